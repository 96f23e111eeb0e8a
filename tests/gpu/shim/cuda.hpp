// The part of CUDA that kernels/*.cu use, on a CPU: a fiber for each thread, all fibers of a block on one thread of the
// operating system. A fiber runs until it waits for others of its warp or block.
//
// It stops the program where a barrier is not reached by all, a warp operation names a lane that is not there or asks
// something else, or a shuffle reads a lane that does not take part. Built with -fsanitize=address it finds accesses out of
// bounds; with -fsanitize=thread, where each block gets a thread of its own and only barriers order fibers, it finds races.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

// Fibers of a scheduler are not what is looked at for races.
#if defined(__SANITIZE_THREAD__)
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define UNSEEN __attribute__((noinline))
#endif

namespace shim {

struct Place {
    uint32_t x;
};
enum class Kind : uint8_t { index, up, exclusive_or, ballot, sync };

Place thread_index();
Place block_index();
void wait_for_block();
// What a lane gets from a warp operation, of which all lanes of the mask take part.
uint64_t warp(Kind kind, uint32_t mask, uint64_t value, uint32_t argument);

template <class T> T shuffle(Kind kind, uint32_t mask, T value, uint32_t argument) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = warp(kind, mask, bits, argument);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A kernel by its name: it is called with addresses of its arguments, as cuLaunchKernel is.
struct Kernel {
    const char *name;
    void (*call)(void **);
    std::vector<uint32_t> sizes;
    std::vector<uint8_t> pointers;
};
std::vector<Kernel> &kernels();

template <auto F, class... A, size_t... I> Kernel describe(const char *name, void (*)(A...), std::index_sequence<I...>) {
    return {name, [](void **given) { F(*(A *)given[I]...); }, {(uint32_t)sizeof(A)...}, {std::is_pointer<A>::value...}};
}
template <auto F, class... A> int add(const char *name, void (*kernel)(A...)) {
    kernels().push_back(describe<F>(name, kernel, std::index_sequence_for<A...>{}));
    return 0;
}

} // namespace shim

#define EXPORT(name) static int shim_##name = shim::add<name>(#name, name);
#define threadIdx (shim::thread_index())
#define blockIdx (shim::block_index())

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline void __syncthreads() { shim::wait_for_block(); }
inline void __syncwarp(uint32_t mask = ~0u) { shim::warp(shim::Kind::sync, mask, 0, 0); }
template <class T> T __shfl_sync(uint32_t mask, T x, uint32_t lane) { return shim::shuffle(shim::Kind::index, mask, x, lane); }
template <class T> T __shfl_up_sync(uint32_t mask, T x, uint32_t by) { return shim::shuffle(shim::Kind::up, mask, x, by); }
template <class T> T __shfl_xor_sync(uint32_t mask, T x, uint32_t with) {
    return shim::shuffle(shim::Kind::exclusive_or, mask, x, with);
}
inline uint32_t __ballot_sync(uint32_t mask, uint32_t vote) {
    return (uint32_t)shim::warp(shim::Kind::ballot, mask, vote != 0, 0);
}
inline uint32_t atomicAdd(uint32_t *at, uint32_t by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t __popc(uint32_t x) { return (uint32_t)__builtin_popcount(x); }
inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
// -ffp-contract=off keeps these apart
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline float __double2float_rn(double x) { return (float)x; }
inline int __double2int_rn(double x) { return (int)std::nearbyint(x); }
inline void store_wide(void *to, uint4 raw) { *(uint4 *)to = raw; }
inline void store_wide(void *to, uint2 raw) { *(uint2 *)to = raw; }
// gcc 12 and later
inline float half_to_float(unsigned short bits) {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return (float)x;
}
inline unsigned short float_to_half(float x) {
    const _Float16 half = (_Float16)x;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
