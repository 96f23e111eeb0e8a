// A double of libcuda.so.1, for tests without a GPU: as much of the driver as offbeat calls, on memory of the host.
//
// Strict where the driver is, and where mistakes would go unseen: a call without a current context is refused (201), a kernel
// on memory that is not the device's makes every later call fail (700), and so does giving back memory that a kernel under way
// uses; addresses of the device cannot be read by the host,
// and what was not given back is told at the end. Kernels are those that fakecuda_register was told of.
//
//   FAKECUDA_SCHED=k          which streams are lazy: streams.h
//   FAKECUDA_FAIL=f:n:code    the n-th call of the function f gives this error
//   FAKECUDA_IDENTITY=1       an address of the device is that of the host, and any is taken: CPU tensors as device memory
//   FAKECUDA_KERNELS=path     a library that registers kernels when it is loaded
//   FAKECUDA_DEVICES=n  FAKECUDA_VERSION=v  FAKECUDA_POOLS=0      what the driver says of itself
//   FAKECUDA_REPORT=1         at the end, on standard error: what leaked, and how often what was called
#include "double.h"
#include "streams.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <set>
#include <string>
#include <vector>

enum : int {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
};

// Addresses of the device have a bit that no address of the host has: whoever reads them on the host crashes.
static const bool IDENTITY = setting("FAKECUDA_IDENTITY", 0);
static const uint64_t ELSEWHERE = IDENTITY ? 0 : 1ull << 60;

struct Context { int device; int retained = 0; };
struct Event { Context *context; std::mutex mutex; std::shared_ptr<Place> last; };
struct Kernel { std::vector<uint32_t> sizes; std::vector<uint8_t> pointers; fakecuda_kernel run; void *user; };
struct Module;
struct Function { Module *module; std::string name; const Kernel *kernel; };
struct Module { Context *context; std::string ptx; std::vector<std::unique_ptr<Function>> functions; };

// All that is alive, behind one lock.
struct World {
    std::mutex mutex;
    bool started = false;
    std::vector<std::unique_ptr<Context>> contexts;
    std::map<uint64_t, size_t> memory;
    std::map<char *, size_t> pinned; // of the host, and in memory too
    std::set<Stream *> streams;
    std::map<Context *, Stream *> defaults;
    std::set<Event *> events;
    std::set<Module *> modules;
    std::map<std::string, Kernel> kernels;
    std::map<std::string, long> counts;
    std::multiset<uint64_t> used; // what kernels under way were given
    std::atomic<int> failed{OK};
    ~World();
    long alive() const {
        long count = memory.size() + streams.size() + events.size() + modules.size();
        for (auto &context : contexts) count += context->retained;
        return count;
    }
};
static World world;
static thread_local std::vector<Context *> stack; // the current context is the last
typedef std::lock_guard<std::mutex> Lock;

World::~World() {
    if (!setting("FAKECUDA_REPORT", 0)) return;
    long retained = 0;
    for (auto &context : contexts) retained += context->retained;
    fprintf(stderr, "libcuda double: leaked memory=%zu streams=%zu events=%zu modules=%zu contexts=%ld; counts:",
            memory.size(), streams.size(), events.size(), modules.size(), retained);
    for (auto &count : counts) fprintf(stderr, " %s=%ld", count.first.c_str(), count.second);
    fprintf(stderr, "\n");
}

static void count(const char *what) { Lock lock(world.mutex); ++world.counts[what]; }

// What every call begins with: it is counted, may be made to fail, and fails if the device has.
static int begin(const char *name, bool needs_context) {
    long number;
    {
        Lock lock(world.mutex);
        number = ++world.counts[name];
    }
    static const char *fail = getenv("FAKECUDA_FAIL");
    char which[64];
    int at, code;
    if (fail && sscanf(fail, "%63[^:]:%d:%d", which, &at, &code) == 3 && !strcmp(which, name) && at == number) return code;
    if (world.failed) return world.failed;
    if (!world.started) return NOT_INITIALIZED;
    return needs_context && (stack.empty() || !stack.back()) ? INVALID_CONTEXT : OK;
}
// Waits that the double forgets: double.h.
struct Forgotten { std::string name; void *stream; bool is_other; long before, times; };
static std::vector<Forgotten> forgotten;
static bool forgets(const char *name, void *stream) {
    Lock lock(world.mutex);
    for (Forgotten &it : forgotten)
        if (it.name == name && (it.stream == stream) != it.is_other && it.before-- <= 0 && it.times-- > 0) return true;
    return false;
}
#define FORGET(stream) if (forgets(__func__, stream)) return OK
#define API extern "C" int
#define BEGIN(needs_context) if (int code = begin(__func__, needs_context)) return code

// The stream behind a handle; null is the default stream of the current context.
static Stream *find(void *handle) {
    Lock lock(world.mutex);
    if (handle) return world.streams.count((Stream *)handle) ? (Stream *)handle : nullptr;
    if (stack.empty()) return nullptr;
    Stream *&stream = world.defaults[stack.back()];
    if (!stream) stream = new Stream(stack.back());
    return stream;
}
#define STREAM Stream *stream = find(handle); if (!stream) return INVALID_HANDLE

static bool is_ours(uint64_t address, size_t bytes) {
    if (bytes == 0) return true;
    if (IDENTITY) return address != 0;
    Lock lock(world.mutex);
    auto after = world.memory.upper_bound(address);
    if (after == world.memory.begin()) return false;
    --after;
    return address + bytes <= after->first + after->second;
}
static void *host(uint64_t address) { return (void *)(address - ELSEWHERE); }
static bool is_alive(Event *event) { Lock lock(world.mutex); return world.events.count(event); }
static std::shared_ptr<Place> last(Event *event) { Lock lock(event->mutex); return event->last; }
// Memory of the host that the device reads and writes by itself, when it comes to it.
static bool is_pinned(const void *start, size_t bytes) {
    Lock lock(world.mutex);
    auto after = world.pinned.upper_bound((char *)start);
    if (after == world.pinned.begin()) return false;
    --after;
    return (char *)start + bytes <= after->first + after->second;
}
// What may keep the host waiting until the device is done: none of it belongs into a step.
static void synchronizes() { count("host synchronizations"); }

API cuInit(unsigned) {
    {
        Lock lock(world.mutex);
        ++world.counts["cuInit"];
        if (!world.started)
            for (long i = 0; i < setting("FAKECUDA_DEVICES", 1); ++i)
                world.contexts.emplace_back(new Context{(int)i});
        world.started = true;
    }
    if (const char *path = getenv("FAKECUDA_KERNELS"))
        if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "libcuda double: %s\n", dlerror());
    return world.contexts.empty() ? NO_DEVICE : OK;
}
API cuDriverGetVersion(int *version) { *version = setting("FAKECUDA_VERSION", 12000); return OK; }
API cuGetErrorString(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "an error of the double";
    return OK;
}
API cuGetErrorName(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
    return OK;
}
API cuDeviceGetCount(int *devices) { BEGIN(false); *devices = world.contexts.size(); return OK; }
API cuDeviceGet(int *device, int ordinal) {
    BEGIN(false);
    *device = ordinal;
    return ordinal >= 0 && ordinal < (int)world.contexts.size() ? OK : INVALID_DEVICE;
}
API cuDeviceGetName(char *name, int length, int device) { BEGIN(false); snprintf(name, length, "double %d", device); return OK; }
API cuDeviceGetAttribute(int *value, int attribute, int) {
    BEGIN(false);
    *value = attribute == 115 /* memory pools */ ? setting("FAKECUDA_POOLS", 1) : attribute == 75 /* capability */ ? 8 : 0;
    return OK;
}
API cuDevicePrimaryCtxRetain(Context **context, int device) {
    BEGIN(false);
    *context = world.contexts.at(device).get();
    Lock lock(world.mutex);
    ++(*context)->retained;
    return OK;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN(false);
    Lock lock(world.mutex);
    return --world.contexts.at(device)->retained >= 0 ? OK : INVALID_CONTEXT;
}
API cuCtxGetCurrent(Context **context) { BEGIN(false); *context = stack.empty() ? nullptr : stack.back(); return OK; }
API cuCtxPushCurrent_v2(Context *context) {
    BEGIN(false);
    if (!context || context->retained <= 0) return INVALID_CONTEXT;
    stack.push_back(context);
    return OK;
}
// Also after a failure: the stack of a thread is to be what it was.
API cuCtxPopCurrent_v2(Context **context) {
    count(__func__);
    if (stack.empty()) return INVALID_CONTEXT;
    *context = stack.back();
    stack.pop_back();
    return OK;
}

API cuStreamCreateWithPriority(void **handle, unsigned, int) {
    BEGIN(true);
    Stream *stream = new Stream(stack.back());
    Lock lock(world.mutex);
    world.streams.insert(stream);
    *handle = stream;
    return OK;
}
API cuStreamDestroy_v2(void *handle) {
    BEGIN(true);
    {
        Lock lock(world.mutex);
        if (!world.streams.erase((Stream *)handle)) return INVALID_HANDLE;
    }
    delete (Stream *)handle;
    return OK;
}
API cuStreamSynchronize(void *handle) { BEGIN(true); STREAM; FORGET(handle); synchronizes(); stream->drain(); return world.failed; }
API cuStreamWaitEvent(void *handle, Event *event, unsigned) {
    BEGIN(true);
    STREAM;
    if (!is_alive(event)) return INVALID_HANDLE;
    FORGET(handle);
    if (auto place = last(event)) stream->push([place] { place->wait(); });
    return OK;
}

API cuEventCreate(Event **event, unsigned) {
    BEGIN(true);
    *event = new Event{stack.back(), {}, {}};
    Lock lock(world.mutex);
    world.events.insert(*event);
    return OK;
}
API cuEventDestroy_v2(Event *event) {
    BEGIN(true);
    {
        Lock lock(world.mutex);
        if (!world.events.erase(event)) return INVALID_HANDLE;
    }
    delete event;
    return OK;
}
API cuEventRecord(Event *event, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_alive(event) || event->context != stream->context) return INVALID_HANDLE;
    auto place = Place::record(stream);
    Lock lock(event->mutex);
    event->last = place;
    return OK;
}
API cuEventQuery(Event *event) {
    BEGIN(true);
    if (!is_alive(event)) return INVALID_HANDLE;
    FORGET(nullptr);
    auto place = last(event);
    return !place || place->is_reached() ? (int)world.failed : NOT_READY;
}

static int allocate(uint64_t *address, size_t bytes) {
    void *memory = nullptr;
    if (!bytes || posix_memalign(&memory, 256, bytes)) return OUT_OF_MEMORY;
    memset(memory, 0xCD, bytes); // NaN in no type, and nothing that looks like a result
    *address = (uint64_t)memory + ELSEWHERE;
    Lock lock(world.mutex);
    world.memory[*address] = bytes;
    return OK;
}
static int release(uint64_t address) {
    {
        Lock lock(world.mutex);
        auto found = world.memory.find(address);
        if (found == world.memory.end()) return INVALID_VALUE;
        auto used = world.used.lower_bound(address);
        if (used != world.used.end() && *used < address + found->second) {
            fprintf(stderr, "libcuda double: memory is given back that a kernel under way uses\n");
            world.failed = ILLEGAL_ADDRESS;
            return OK; // as the driver: it shows later
        }
        memset(host(address), 0xDD, found->second);
        world.memory.erase(found);
    }
    free(host(address));
    return OK;
}
API cuMemAlloc_v2(uint64_t *address, size_t bytes) { BEGIN(true); synchronizes(); return allocate(address, bytes); }
API cuMemFree_v2(uint64_t address) {
    BEGIN(true);
    synchronizes();
    std::vector<Stream *> all;
    {
        Lock lock(world.mutex);
        all.assign(world.streams.begin(), world.streams.end());
    }
    for (Stream *stream : all) stream->drain();
    return release(address);
}
// Memory of the host that the device reaches under an address of its own.
API cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    BEGIN(true);
    uint64_t address = 0;
    const int code = allocate(&address, bytes);
    *memory = code ? nullptr : host(address);
    Lock lock(world.mutex);
    if (!code) world.pinned[(char *)*memory] = bytes;
    return code;
}
API cuMemFreeHost(void *memory) {
    BEGIN(true);
    {
        Lock lock(world.mutex);
        world.pinned.erase((char *)memory);
    }
    return release((uint64_t)memory + ELSEWHERE);
}
API cuMemHostGetDevicePointer_v2(uint64_t *address, void *memory, unsigned) {
    BEGIN(true);
    *address = (uint64_t)memory + ELSEWHERE;
    return is_ours(*address, 1) ? OK : INVALID_VALUE;
}
API cuMemAllocAsync(uint64_t *address, size_t bytes, void *handle) { BEGIN(true); STREAM; return allocate(address, bytes); }
API cuMemFreeAsync(uint64_t address, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_ours(address, 1)) return INVALID_VALUE;
    stream->push([address] { release(address); });
    return OK;
}
// Pinned memory is read when the stream comes to it. Of other memory the driver has made a copy when it returns.
API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_ours(to, bytes)) return INVALID_VALUE;
    if (is_pinned(from, bytes)) {
        stream->push([=] { memcpy(host(to), from, bytes); });
        return OK;
    }
    auto copy = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
    stream->push([=] { memcpy(host(to), copy->data(), bytes); });
    return OK;
}
API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_ours(from, bytes)) return INVALID_VALUE;
    if (!is_pinned(to, bytes)) synchronizes();
    stream->push([=] { memcpy(to, host(from), bytes); });
    return OK;
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_ours(from, bytes) || !is_ours(to, bytes)) return INVALID_VALUE;
    stream->push([=] { memmove(host(to), host(from), bytes); });
    return OK;
}
API cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void *handle) {
    BEGIN(true);
    STREAM;
    if (!is_ours(at, bytes)) return INVALID_VALUE;
    stream->push([=] { memset(host(at), value, bytes); });
    return OK;
}

API cuModuleLoadData(Module **module, const void *image) {
    BEGIN(true);
    std::string ptx((const char *)image);
    if (ptx.find(".version") == std::string::npos) return INVALID_IMAGE;
    *module = new Module{stack.back(), std::move(ptx), {}};
    Lock lock(world.mutex);
    world.modules.insert(*module);
    return OK;
}
API cuModuleUnload(Module *module) {
    BEGIN(true);
    {
        Lock lock(world.mutex);
        if (!world.modules.erase(module)) return INVALID_HANDLE;
    }
    delete module;
    return OK;
}
// Whether PTX declares a kernel with the arguments that it is registered with.
static bool declares(const std::string &ptx, const std::string &name, const Kernel &kernel) {
    const size_t begin = ptx.find(".entry " + name + "(");
    if (begin == std::string::npos) return false;
    const size_t end = ptx.find(')', begin + name.size() + 8);
    std::vector<uint32_t> sizes;
    for (size_t at = begin; (at = ptx.find(".param .", at)) < end;) {
        at += 8; // u64, f32, b8 …: a letter and bits
        sizes.push_back(atoi(ptx.c_str() + at + 1) / 8);
    }
    return sizes == kernel.sizes;
}
API cuModuleGetFunction(Function **function, Module *module, const char *name) {
    BEGIN(true);
    Lock lock(world.mutex);
    auto kernel = world.kernels.find(name);
    if (module->ptx.find(std::string(".entry ") + name + "(") == std::string::npos) return NOT_FOUND;
    if (kernel == world.kernels.end() || !declares(module->ptx, name, kernel->second)) {
        fprintf(stderr, "libcuda double: %s is not registered, or with other arguments than its PTX has\n", name);
        return INVALID_IMAGE;
    }
    module->functions.emplace_back(new Function{module, name, &kernel->second});
    *function = module->functions.back().get();
    return OK;
}
API cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *handle, void **arguments, void **extra) {
    BEGIN(true);
    STREAM;
    if (extra || !gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gy > 65535 || gz > 65535 || shared > 49152)
        return INVALID_VALUE;
    if (function->module->context != stream->context) return INVALID_CONTEXT;
    const Kernel *kernel = function->kernel;
    auto values = std::make_shared<std::vector<uint64_t>>(kernel->sizes.size());
    for (size_t i = 0; i < values->size(); ++i) {
        uint64_t &value = (*values)[i];
        memcpy(&value, arguments[i], kernel->sizes[i]);
        if (!kernel->pointers[i] || !value) continue;
        if (!is_ours(value, 1)) {
            fprintf(stderr, "libcuda double: %s: argument %zu is not memory of the device\n", function->name.c_str(), i);
            world.failed = ILLEGAL_ADDRESS;
            return OK; // as the driver: it shows later
        }
        value -= ELSEWHERE;
    }
    count("kernels");
    auto use = [=](bool begins) {
        Lock lock(world.mutex);
        for (size_t i = 0; i < values->size(); ++i)
            if (kernel->pointers[i] && (*values)[i]) {
                const uint64_t address = (*values)[i] + ELSEWHERE;
                begins ? (void)world.used.insert(address) : (void)world.used.erase(world.used.find(address));
            }
    };
    use(true);
    stream->push([=] {
        std::vector<void *> places;
        for (uint64_t &value : *values) places.push_back(&value);
        const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
        kernel->run(grid, block, places.data(), kernel->user);
        use(false);
    });
    return OK;
}

int fakecuda_register(const char *name, uint32_t arguments, const uint32_t *sizes, const uint8_t *pointers,
                      fakecuda_kernel run, void *user) {
    Lock lock(world.mutex);
    world.kernels[name] = Kernel{{sizes, sizes + arguments}, {pointers, pointers + arguments}, run, user};
    return OK;
}
void fakecuda_forget(const char *name, void *stream, int is_other, long before, long times) {
    Lock lock(world.mutex);
    forgotten.push_back({name, stream, is_other != 0, before, times});
}
long fakecuda_count(const char *what) { Lock lock(world.mutex); return world.counts[what]; }
long fakecuda_alive(void) { Lock lock(world.mutex); return world.alive(); }
void *fakecuda_host(uint64_t address, size_t bytes) { return is_ours(address, bytes) ? host(address) : nullptr; }
int fakecuda_push(void *handle, void (*work)(void *), void *argument) {
    STREAM;
    stream->push([=] { work(argument); });
    return OK;
}
void fakecuda_drain(void *handle) { if (Stream *stream = find(handle)) stream->drain(); }
void fakecuda_schedule(long lazy) { Stream::set_schedule(lazy); }
void fakecuda_waiting(int is) { Stream::set_waiting(is); }
