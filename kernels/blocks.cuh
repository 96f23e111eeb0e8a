// The loops around codecs: a warp takes a tile, and a codec says what happens to one block of it.
//
// A block is in registers while it is worked on: a lane has some of its elements, in groups of four. So values, residuals
// and records are each read once and written once, and nothing is shared between warps.
//
// A codec C has
//   SIZE, RECORD           elements and bytes of a whole block
//   GROUPS                 groups of four neighbours that a lane has: SIZE / 128
//   RANDOM                 whether it draws random numbers
//   coded                  a record in registers
//   fill(v, count)         fills up a short block, as the CPU does
//   encode(v, count, key)  a block as a record
//   write, read            records from and to memory
//   value(c, k, j)         an element
//   odd(c, count)          this lane's share of the number of blocks that are not finite
#pragma once

#include "common.cuh"

// The finalizer of splitmix64, and the golden ratio by which its counters go on.
constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;
DEVICE u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
// From which a block draws its random numbers.
DEVICE u64 key_of(u64 stream, u64 number) { return mix(stream ^ mix(number + GOLDEN)); }
DEVICE u64 draw(u64 key, u32 counter) { return mix(key + ((u64)counter + 1) * GOLDEN); }

// Zeros after the end of a short block.
template <class C> DEVICE void zero_rest(float v[C::GROUPS][4], u32 count) {
#pragma unroll
    for (u32 k = 0; k < C::GROUPS; ++k)
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (place(k) + j >= count) v[k][j] = 0.0f;
}

// The bits of the largest magnitude of a block.
template <class C> DEVICE u32 largest_of(const float v[C::GROUPS][4]) {
    u32 largest = 0;
    for (u32 k = 0; k < C::GROUPS; ++k)
        for (u32 j = 0; j < 4; ++j) {
            const u32 one = magnitude(v[k][j]);
            largest = largest > one ? largest : one;
        }
    return warp_max(largest);
}

// Codes of a byte each, a lane's four neighbours in a word.
template <class C> DEVICE void write_bytes(const u32 codes[C::GROUPS], u32 count, u8 *to) {
#pragma unroll
    for (u32 k = 0; k < C::GROUPS; ++k) {
        const u32 at = place(k);
        if (at + 4 <= count) {
            *(u32 *)(to + at) = codes[k];
            continue;
        }
        for (u32 j = 0; at + j < count; ++j) to[at + j] = (u8)(codes[k] >> 8 * j);
    }
}

template <class C> DEVICE void read_bytes(const u8 *from, u32 count, u32 codes[C::GROUPS]) {
#pragma unroll
    for (u32 k = 0; k < C::GROUPS; ++k) {
        const u32 at = place(k);
        codes[k] = 0;
        if (at + 4 <= count) {
            codes[k] = *(const u32 *)(from + at);
            continue;
        }
        for (u32 j = 0; at + j < count; ++j) codes[k] |= (u32)from[at + j] << 8 * j;
    }
}

// What is encoded: values as they are. Others make it of several arrays.
template <class T> struct Values {
    const T *values;
    // Four elements, of which `left` are there; the others are zero.
    DEVICE_MEMBER void load(u64 at, u32 left, float to[4]) const { load4(values + at, left, to); }
};

// Elements of a block from the first on; zero after its end.
template <class C, class S> DEVICE void load(const S &source, u64 first, u32 count, float v[C::GROUPS][4]) {
#pragma unroll
    for (u32 k = 0; k < C::GROUPS; ++k) source.load(first + place(k), left_of(count, place(k)), v[k]);
}

// Encodes a block that is in registers: adds its residual if there is one, writes the record, and keeps what is lost.
template <class C> DEVICE void seal(float v[C::GROUPS][4], u32 count, bool keeps, float *residual, u64 key, u8 *record,
                               u32 *odd) {
    if (keeps) {
#pragma unroll
        for (u32 k = 0; k < C::GROUPS; ++k) {
            float r[4];
            load4(residual + place(k), left_of(count, place(k)), r);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) v[k][j] = add(v[k][j], r[j]);
        }
    }
    if (count < C::SIZE) C::fill(v, count);
    typename C::coded c;
    C::encode(v, count, key, c);
    C::write(c, count, record);
    if (keeps) {
#pragma unroll
        for (u32 k = 0; k < C::GROUPS; ++k) {
            float sent[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) sent[j] = C::value(c, k, j);
            store_rest4(residual + place(k), left_of(count, place(k)), v[k], sent);
        }
    }
    const u32 bad = C::odd(c, count);
    if (odd && bad) atomicAdd(odd, bad);
}

DEVICE u64 number_of(const u64 *numbers, u64 block) { return numbers ? numbers[block] : block; }

// What kernels do, for a codec that is worked on in registers.
template <class C> struct Loops {
    template <class S>
    static DEVICE_MEMBER void encode(S source, float *residual, const tile *tiles, u32 tile_count, u8 *records,
                                     const u64 *numbers, u64 stream, u32 *odd) {
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        u8 *record = records + mine.record;
        for (u32 at = 0; at < mine.count; at += C::SIZE, record += C::RECORD) {
            const u32 count = min(mine.count - at, C::SIZE);
            const u64 first = mine.value + at;
            float v[C::GROUPS][4];
            load<C>(source, first, count, v);
            const u64 key = C::RANDOM ? key_of(stream, number_of(numbers, first / C::SIZE)) : 0;
            seal<C>(v, count, residual != nullptr, residual + first, key, record, odd);
        }
    }

    template <bool ADD, class T>
    static DEVICE_MEMBER void decode(const u8 *records, const tile *tiles, u32 tile_count, T *values) {
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        const u8 *record = records + mine.record;
        for (u32 at = 0; at < mine.count; at += C::SIZE, record += C::RECORD) {
            const u32 count = min(mine.count - at, C::SIZE);
            T *to = values + mine.value + at;
            typename C::coded c;
            C::read(record, count, c);
            float v[C::GROUPS][4];
            if (ADD) load<C>(Values<T>{to}, 0, count, v);
#pragma unroll
            for (u32 k = 0; k < C::GROUPS; ++k) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) v[k][j] = ADD ? add(v[k][j], C::value(c, k, j)) : C::value(c, k, j);
                store4(to + place(k), left_of(count, place(k)), v[k]);
            }
        }
    }

    // What the owner of a part does: decodes everybody's share in order, sums, divides, and encodes the result.
    static DEVICE_MEMBER void average(const u8 *shares, u64 stride, u32 peers, float divisor, float *residual,
                                      const tile *tiles, u32 tile_count, u8 *records, const u64 *numbers, u64 stream,
                                      u32 *odd) {
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        u64 record = mine.record;
        for (u32 at = 0; at < mine.count; at += C::SIZE, record += C::RECORD) {
            const u32 count = min(mine.count - at, C::SIZE);
            const u64 first = mine.value + at;
            float v[C::GROUPS][4] = {};
            for (u32 peer = 0; peer < peers; ++peer) {
                typename C::coded c;
                C::read(shares + peer * stride + record, count, c);
#pragma unroll
                for (u32 k = 0; k < C::GROUPS; ++k)
#pragma unroll
                    for (u32 j = 0; j < 4; ++j)
                        v[k][j] = peer == 0 ? C::value(c, k, j) : add(v[k][j], C::value(c, k, j));
            }
#pragma unroll
            for (u32 k = 0; k < C::GROUPS; ++k)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) v[k][j] = div(v[k][j], divisor);
            const u64 key = C::RANDOM ? key_of(stream, number_of(numbers, first / C::SIZE)) : 0;
            seal<C>(v, count, residual != nullptr, residual + first, key, records + record, odd);
        }
    }
};

// The loop around what is no codec's: calls `work(at, left)` for four neighbours of the warp's tile at a time, the first of
// which is the `at`-th. UNROLL rounds are under way at once.
template <u32 UNROLL, class W> DEVICE void by_fours(const tile &mine, W work) {
#pragma unroll UNROLL
    for (u32 at = 4 * lane_of(); at < mine.count; at += 4 * WARP) work(at, mine.count - at);
}

// Eight blocks are all that the smallest multiprocessor holds: fewer registers than that allows would only be spilled.
#define KERNEL extern "C" __global__ void __launch_bounds__(128, 8)

// The kernels of a codec for one type of values.
#define TYPED_KERNELS(C, name, T, type) \
    KERNEL offbeat_##name##_encode_##type(const T *values, float *residual, const tile *tiles, u32 tile_count, \
                                          u8 *records, const u64 *numbers, u64 stream, u32 *odd) { \
        Loops<C>::encode(Values<T>{values}, residual, tiles, tile_count, records, numbers, stream, odd); \
    } \
    KERNEL offbeat_##name##_decode_##type(const u8 *records, const tile *tiles, u32 tile_count, T *values) { \
        Loops<C>::decode<false>(records, tiles, tile_count, values); \
    } \
    KERNEL offbeat_##name##_add_##type(const u8 *records, const tile *tiles, u32 tile_count, T *values) { \
        Loops<C>::decode<true>(records, tiles, tile_count, values); \
    } \
    EXPORT(offbeat_##name##_encode_##type) \
    EXPORT(offbeat_##name##_decode_##type) \
    EXPORT(offbeat_##name##_add_##type)

// All kernels of a codec.
#define KERNELS(C, name) \
    TYPED_KERNELS(C, name, float, f32) \
    TYPED_KERNELS(C, name, f16_t, f16) \
    TYPED_KERNELS(C, name, bf16_t, bf16) \
    KERNEL offbeat_##name##_average(const u8 *shares, u64 stride, u32 peers, float divisor, float *residual, \
                                    const tile *tiles, u32 tile_count, u8 *records, const u64 *numbers, u64 stream, \
                                    u32 *odd) { \
        Loops<C>::average(shares, stride, peers, divisor, residual, tiles, tile_count, records, numbers, stream, odd); \
    } \
    EXPORT(offbeat_##name##_average)
