// Gossip by encoded differences to copies that both sides keep: rust/core/src/algorithm/replicas.rs on a warp.
//
// A host tells its peers in one pass over its weights and copies, and hears them in another: what is told is never in memory
// but as records.
#pragma once

#include "blocks.cuh"

// What a host tells: how far its weights are from what the others know, and on a ring where the neighbours draw them.
template <class T> struct Told {
    const T *values;
    const float *own, *left, *right; // no left, no ring
    float to_left, to_right;

    DEVICE_MEMBER void load(u64 at, u32 count, float to[4]) const {
        float w[4], l[4], r[4];
        load4(values + at, count, to);
        load4(own + at, count, w);
        for (u32 j = 0; j < 4; ++j) to[j] = sub(to[j], w[j]);
        if (!left) return;
        load4(left + at, count, l);
        load4(right + at, count, r);
        for (u32 j = 0; j < 4; ++j) {
            to[j] = add(add(to[j], mul(to_left, sub(l[j], w[j]))), mul(to_right, sub(r[j], w[j])));
        }
    }
};

// Reads the records of a tile some elements at a time: blocks, or less where these are long.
template <class C> struct Reader {
    static const u32 SIZE = C::SIZE, GROUPS = C::GROUPS;
    typedef typename C::coded coded;

    static DEVICE_MEMBER void read(const u8 *records, u32 at, u32 count, coded &c) {
        C::read(records + at / SIZE * C::RECORD, count, c);
    }
    static DEVICE_MEMBER void values(const coded &c, u32 k, float to[4]) {
        for (u32 j = 0; j < 4; ++j) to[j] = C::value(c, k, j);
    }
};

// For a codec with long blocks of a byte for each element: four of a lane at a time, as there are few registers for copies.
template <class C> struct ByteReader {
    static const u32 SIZE = 4 * WARP, GROUPS = 1;
    typedef typename C::coded coded;

    static DEVICE_MEMBER void read(const u8 *records, u32 at, u32 count, coded &c) {
        const u8 *record = records + at / C::SIZE * C::RECORD;
        C::read_head(record, c);
        read_bytes<ByteReader>(record + C::HEAD + at % C::SIZE, count, c.codes);
    }
    static DEVICE_MEMBER void values(const coded &c, u32, float to[4]) {
        for (u32 j = 0; j < 4; ++j) to[j] = C::value(c, 0, j);
    }
};

// Adds what is finite; the other side leaves out the same.
template <class R> DEVICE void gain(float v[R::GROUPS][4], const typename R::coded &c, float weight) {
#pragma unroll
    for (u32 k = 0; k < R::GROUPS; ++k) {
        float news[4];
        R::values(c, k, news);
        for (u32 j = 0; j < 4; ++j) v[k][j] = is_finite(news[j]) ? add(v[k][j], mul(weight, news[j])) : v[k][j];
    }
}

template <class R> DEVICE void load_known(const float *from, u32 count, float v[R::GROUPS][4]) {
    load<R>(Values<float>{from}, 0, count, v);
}
template <class R> DEVICE void store_known(float *to, u32 count, const float v[R::GROUPS][4]) {
    for (u32 k = 0; k < R::GROUPS; ++k) store4(to + place(k), left_of(count, place(k)), v[k]);
}

// Brings all copies up to date, and the weights to where they go. `weights` and `gamma` are CHOCO's, whose sum over all
// copies is `first`; else `first` and `second` are copies of the neighbours, of which `left` and `right` are the records.
template <class C, class T>
DEVICE void hear(T *values, float *own, float *first, float *second, const u8 *told, const u8 *heard, u64 stride,
                 u32 peers, u32 left, u32 right, const float *weights, float gamma, const tile *tiles, u32 tile_count) {
    typedef Reader<C> R;
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    for (u32 at = 0; at < mine.count; at += R::SIZE) {
        const u32 count = min(mine.count - at, R::SIZE);
        const u64 from = mine.value + at;
        typename R::coded c;
        float w[R::GROUPS][4], v[R::GROUPS][4];
        R::read(told + mine.record, at, count, c);
        load_known<R>(own + from, count, w);
        gain<R>(w, c, 1.0f);
        store_known<R>(own + from, count, w);
        load_known<R>(first + from, count, v);
        if (second) {
            R::read(heard + left * stride + mine.record, at, count, c);
            gain<R>(v, c, 1.0f);
            store_known<R>(first + from, count, v);
            load_known<R>(second + from, count, v);
            R::read(heard + right * stride + mine.record, at, count, c);
            gain<R>(v, c, 1.0f);
            store_known<R>(second + from, count, v);
        } else {
            gain<R>(v, c, weights[0]);
            for (u32 peer = 0; peer < peers; ++peer) {
                R::read(heard + peer * stride + mine.record, at, count, c);
                gain<R>(v, c, weights[1 + peer]);
            }
            store_known<R>(first + from, count, v);
        }
        for (u32 k = 0; k < R::GROUPS; ++k) {
            T *to = values + from + place(k);
            const u32 there = left_of(count, place(k));
            float x[4];
            load4(to, there, x);
            for (u32 j = 0; j < 4; ++j) {
                // on a ring what is not finite here has changed no copy, and is for this rank to see
                const float known = is_finite(x[j]) ? w[k][j] : x[j];
                x[j] = second ? known : add(x[j], mul(gamma, sub(v[k][j], w[k][j])));
            }
            store4(to, there, x);
        }
    }
}

// Hearing holds a block of each array at once: with the registers that eight blocks leave, some would be spilled.
#define HEARING extern "C" __global__ void __launch_bounds__(128, 6)

#define TYPED_REPLICAS(C, name, T, type) \
    KERNEL offbeat_##name##_tell_##type(const T *values, const float *own, const float *left, const float *right, \
                                        float to_left, float to_right, const tile *tiles, u32 tile_count, u8 *records, \
                                        const u64 *numbers, u64 stream, u32 *odd) { \
        const Told<T> source = {values, own, left, right, to_left, to_right}; \
        Loops<C>::encode(source, (float *)nullptr, tiles, tile_count, records, numbers, stream, odd); \
    } \
    HEARING offbeat_##name##_hear_##type(T *values, float *own, float *first, float *second, const u8 *told, \
                                         const u8 *heard, u64 stride, u32 peers, u32 left, u32 right, \
                                         const float *weights, float gamma, const tile *tiles, u32 tile_count) { \
        hear<C>(values, own, first, second, told, heard, stride, peers, left, right, weights, gamma, tiles, tile_count); \
    } \
    EXPORT(offbeat_##name##_tell_##type) \
    EXPORT(offbeat_##name##_hear_##type)

// The kernels of a codec for gossip by differences.
#define REPLICAS(C, name) \
    TYPED_REPLICAS(C, name, float, f32) \
    TYPED_REPLICAS(C, name, f16_t, f16) \
    TYPED_REPLICAS(C, name, bf16_t, bf16)
