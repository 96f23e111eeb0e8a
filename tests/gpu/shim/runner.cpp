// Runs a job: a file with buffers and launches, after which the buffers are written to another file. Each buffer is memory
// of its own, of exactly its length, so that the address sanitizer sees what lies outside.
//
//   u32 buffers:  { u64 bytes, the bytes }
//   u32 launches: { u32 length, name, u32 blocks, u32 threads, u32 arguments: { u32 buffer or NONE or SCALAR, u64 offset or value } }
#include "fibers.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr uint32_t NONE = 0xffffffff, SCALAR = 0xfffffffe;

struct Reader {
    FILE *file;
    void read(void *to, size_t bytes) {
        if (bytes && fread(to, bytes, 1, file) != 1) {
            fprintf(stderr, "runner: the job ends too early\n");
            exit(2);
        }
    }
    template <class T> T number() {
        T x;
        read(&x, sizeof x);
        return x;
    }
};

struct Buffer {
    void *start;
    size_t bytes;
};

void launch(Reader &job, const std::vector<Buffer> &buffers) {
    std::string name(job.number<uint32_t>(), ' ');
    job.read(name.data(), name.size());
    const uint32_t blocks = job.number<uint32_t>(), threads = job.number<uint32_t>();
    std::vector<uint64_t> arguments(job.number<uint32_t>());
    for (uint64_t &one : arguments) {
        const uint32_t buffer = job.number<uint32_t>();
        const uint64_t value = job.number<uint64_t>();
        one = buffer == SCALAR ? value : buffer == NONE ? 0 : (uint64_t)buffers.at(buffer).start + value;
    }
    for (const shim::Kernel &kernel : shim::kernels()) {
        if (name != kernel.name) continue;
        if (kernel.sizes.size() != arguments.size()) {
            fprintf(stderr, "runner: %s takes %zu arguments, not %zu\n", kernel.name, kernel.sizes.size(), arguments.size());
            exit(2);
        }
        std::vector<void *> addresses;
        for (uint64_t &one : arguments) addresses.push_back(&one);
        fprintf(stderr, "runner: %s\n", kernel.name);
        return shim::launch(blocks, threads, [&] { kernel.call(addresses.data()); });
    }
    fprintf(stderr, "runner: no kernel %s\n", name.c_str());
    exit(2);
}

} // namespace

int main(int argc, char **argv) {
    if (argc == 2 && std::string(argv[1]) == "--list") {
        for (const shim::Kernel &kernel : shim::kernels()) {
            printf("%s", kernel.name);
            for (uint32_t size : kernel.sizes) printf(" %u", size);
            printf("\n");
        }
        return 0;
    }
    if (argc != 3) return 2;
    Reader job{fopen(argv[1], "rb")};
    std::vector<Buffer> buffers(job.number<uint32_t>());
    for (Buffer &one : buffers) {
        one.bytes = job.number<uint64_t>();
        if (posix_memalign(&one.start, 256, one.bytes)) return 2;
        job.read(one.start, one.bytes);
    }
    const uint32_t launches = job.number<uint32_t>();
    for (uint32_t i = 0; i < launches; ++i) launch(job, buffers);
    fclose(job.file);
    FILE *out = fopen(argv[2], "wb");
    for (const Buffer &one : buffers) fwrite(one.start, 1, one.bytes, out);
    fclose(out);
    for (const Buffer &one : buffers) free(one.start);
    return 0;
}
