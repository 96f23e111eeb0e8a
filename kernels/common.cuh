// What all kernels share: types, conversions, four numbers at a time, and where a warp finds its work.
//
// No header of CUDA is needed: the same text compiles under NVRTC, and under g++ with tests/gpu/shim. Arithmetic is spelled
// out in operations that are rounded to the nearest and never fused, so that the bits are those of the CPU (rust/core/src/codec).
#pragma once

#include "device.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE static DEVICE_MEMBER

// Makes a kernel known by its name to whoever runs it on a CPU.
#ifndef EXPORT
#define EXPORT(name)
#endif

// A warp works together, and all its lanes are there.
constexpr u32 WARP = 32;
constexpr u32 ALL = 0xffffffffu;
// Threads of a block of the kernels that give each warp a tile.
constexpr u32 THREADS = 128;

// A run of elements of one tensor, at most a few thousand. It begins at a block of the codec, and only the last tile of a
// tensor ends elsewhere.
struct tile {
    u64 value;  // its first element, in values and residuals
    u64 record; // its first byte, in records: a multiple of 4, and of 16 for the widest stores
    u32 count;  // its elements
    u32 span;   // which tensor it is of: for kernels that work on whole tensors
};

DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
DEVICE double sub(double a, double b) { return __dadd_rn(a, -b); }
DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
DEVICE double div(double a, double b) { return __ddiv_rn(a, b); }

// The bits of the only NaN that records hold.
constexpr u32 NAN_BITS = 0x7fc00000u;
DEVICE float nan() { return __uint_as_float(NAN_BITS); }
// The bits of a number without its sign: they order magnitudes, with NaN above infinity.
DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
DEVICE bool is_finite(float x) { return magnitude(x) < 0x7f800000u; }
DEVICE bool is_nan(float x) { return magnitude(x) > 0x7f800000u; }

// Numbers of 16 bits. What a processor makes of NaN differs, so every NaN becomes the same here.
struct f16_t { u16 bits; };
struct bf16_t { u16 bits; };
DEVICE float wide(float x) { return x; }
DEVICE float wide(f16_t x) { return half_to_float(x.bits); }
DEVICE float wide(bf16_t x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE u16 to_half(float x) { return is_nan(x) ? (u16)0x7e00 : float_to_half(x); }
DEVICE u16 to_brain(float x) {
    const u32 bits = __float_as_uint(x);
    return is_nan(x) ? (u16)0x7fc0 : (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
DEVICE void narrow(float x, float &to) { to = x; }
DEVICE void narrow(float x, f16_t &to) { to.bits = to_half(x); }
DEVICE void narrow(float x, bf16_t &to) { to.bits = to_brain(x); }

// Four neighbours at once, of which `left` are there; the others are zero, or not written. Wide accesses need an address
// that is a multiple of their size; the address of the first of many is enough to ask, since groups follow each other.
template <class T> DEVICE bool is_aligned(const T *at) { return ((u64)at & (4 * sizeof(T) - 1)) == 0; }
DEVICE u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

DEVICE void load4(const float *from, u32 left, float to[4]) {
    if (left >= 4 && is_aligned(from)) {
        const uint4 raw = *(const uint4 *)from;
        to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
        to[2] = __uint_as_float(raw.z), to[3] = __uint_as_float(raw.w);
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) to[j] = j < left ? from[j] : 0.0f;
}
// The bits of four numbers of 16 bits.
template <class T> DEVICE uint2 load_bits(const T *from, u32 left) {
    if (left >= 4 && is_aligned(from)) return *(const uint2 *)from;
    u16 one[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) one[j] = j < left ? from[j].bits : (u16)0;
    uint2 raw;
    raw.x = pair(one[0], one[1]), raw.y = pair(one[2], one[3]);
    return raw;
}
template <class T> DEVICE void load4(const T *from, u32 left, float to[4]) {
    const uint2 raw = load_bits(from, left);
    to[0] = wide(T{(u16)raw.x}), to[1] = wide(T{(u16)(raw.x >> 16)});
    to[2] = wide(T{(u16)raw.y}), to[3] = wide(T{(u16)(raw.y >> 16)});
}

DEVICE uint4 raw_of(const float x[4]) {
    uint4 raw;
    raw.x = __float_as_uint(x[0]), raw.y = __float_as_uint(x[1]);
    raw.z = __float_as_uint(x[2]), raw.w = __float_as_uint(x[3]);
    return raw;
}
DEVICE void store4(float *to, u32 left, const float x[4]) {
    if (left >= 4 && is_aligned(to)) return store_wide(to, raw_of(x));
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        if (j < left) to[j] = x[j];
}
template <class T> DEVICE void store_bits(T *to, u32 left, uint2 raw) {
    if (left >= 4 && is_aligned(to)) return store_wide(to, raw);
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        if (j < left) to[j].bits = (u16)((j < 2 ? raw.x : raw.y) >> 16 * (j % 2));
}
template <class T> DEVICE uint2 bits_of(const float x[4]) {
    T part[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) narrow(x[j], part[j]);
    uint2 raw;
    raw.x = pair(part[0].bits, part[1].bits), raw.y = pair(part[2].bits, part[3].bits);
    return raw;
}
template <class T> DEVICE void store4(T *to, u32 left, const float x[4]) { store_bits(to, left, bits_of<T>(x)); }

// Stores what is lost of four numbers if `sent` is what is sent of them. Where that is not finite the residual stays.
DEVICE void store_rest4(float *residual, u32 left, const float x[4], const float sent[4]) {
    float rest[4];
    bool all = true;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        rest[j] = sub(x[j], sent[j]);
        all = all && is_finite(sent[j]);
    }
    if (all) return store4(residual, left, rest);
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        if (j < left && is_finite(sent[j])) residual[j] = rest[j];
}

DEVICE u32 lane_of() { return threadIdx.x & (WARP - 1); }
// How many of `count` elements stand from a place on.
DEVICE u32 left_of(u32 count, u32 at) { return count > at ? count - at : 0; }
// The first of a lane's four neighbours among the 128 of its warp's k-th round.
DEVICE u32 place(u32 k) { return 4 * WARP * k + 4 * lane_of(); }

// The warp's tile, if there is one for it.
DEVICE bool find_tile(const tile *tiles, u32 tile_count, tile &mine) {
    const u32 at = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (at < tile_count) mine = tiles[at];
    return at < tile_count;
}

DEVICE float warp_min(float x) {
    for (u32 d = WARP / 2; d > 0; d /= 2) x = fminf(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
DEVICE float warp_max(float x) {
    for (u32 d = WARP / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
DEVICE u32 warp_max(u32 x) {
    for (u32 d = WARP / 2; d > 0; d /= 2) {
        const u32 other = __shfl_xor_sync(ALL, x, d);
        x = x > other ? x : other;
    }
    return x;
}
// Lane l adds lane l + 16, then l + 8, 4, 2 and 1; every lane gets the sum.
DEVICE float warp_sum(float x) {
    for (u32 d = WARP / 2; d > 0; d /= 2) x = add(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
DEVICE u32 warp_sum(u32 x) {
    for (u32 d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}

// Adding it leaves an integer in the low bits of a number of less than 2^22, to the nearest, ties to even: 1.5 * 2^23.
constexpr float MAGIC = 12582912.0f;
DEVICE float nearest(float x) { return sub(add(x, MAGIC), MAGIC); }
// A number as the nearest byte.
DEVICE u32 to_byte(float x) { return __float_as_uint(add(fminf(fmaxf(x, 0.0f), 255.0f), MAGIC)) & 0xffu; }
DEVICE float from_byte(u32 codes, u32 at) { return (float)(codes >> 8 * at & 0xffu); }

constexpr float LEAST_NORMAL = 1.17549435e-38f;
constexpr double LARGEST = 3.4028234663852886e38;

// The step of a grid: a little over `exact`, with 16 significant bits and not denormal; zero for zero.
DEVICE float grid_step(double exact) {
    const u32 bits = (__float_as_uint(__double2float_rn(exact)) & ~0xffu) + 0x100u;
    return exact == 0.0 ? 0.0f : fmaxf(__uint_as_float(bits), LEAST_NORMAL);
}
// The step of a grid from -levels to levels steps that reaches `largest`, and no number on it overflows.
DEVICE float symmetric_step(float largest, double levels) {
    const float most = __uint_as_float(__float_as_uint((float)(LARGEST / levels)) & ~0xffu);
    return fminf(grid_step(mul((double)largest, 1.0 / levels)), most);
}
// What to multiply with instead of dividing by a step.
DEVICE float inverse(float step) { return step == 0.0f ? 0.0f : div(1.0f, step); }
