// The kernels as a library that a double of libcuda loads (FAKECUDA_KERNELS). It must be linked last: then all kernels are
// known when it begins.
#include "fibers.hpp"

extern "C" int fakecuda_register(const char *name, uint32_t count, const uint32_t *sizes, const uint8_t *pointers,
                                 void (*run)(const unsigned grid[3], const unsigned block[3], void **arguments, void *user),
                                 void *user);

namespace {

void run(const unsigned grid[3], const unsigned block[3], void **arguments, void *user) {
    const auto *kernel = (const shim::Kernel *)user;
    shim::launch(grid[0], block[0], [&] { kernel->call(arguments); });
}

int register_all() {
    for (shim::Kernel &one : shim::kernels())
        fakecuda_register(one.name, (uint32_t)one.sizes.size(), one.sizes.data(), one.pointers.data(), run, &one);
    return 0;
}
int registered = register_all();

} // namespace
