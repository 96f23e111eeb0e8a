// Weights as how far they are from their anchor, and the outer step: rust/core/src/algorithm/outer.rs.
#include "blocks.cuh"

template <class T> DEVICE void difference(T *values, const float *anchor, const tile *tiles, u32 tile_count) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    by_fours<4>(mine, [&](u32 at, u32 left) {
        const u64 first = mine.value + at;
        float x[4], a[4];
        load4(values + first, left, x);
        load4(anchor + first, left, a);
        for (u32 j = 0; j < 4; ++j) x[j] = sub(a[j], x[j]);
        store4(values + first, left, x);
    });
}

// What is not finite moves nothing, stays for all to see, and is counted.
template <class T>
DEVICE void outer(T *values, float *anchor, float *speed, float lr, float momentum, const tile *tiles, u32 tile_count,
                  u32 *odd) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    u32 bad = 0;
    by_fours<2>(mine, [&](u32 at, u32 left) {
        const u64 first = mine.value + at;
        float x[4], a[4], v[4];
        load4(values + first, left, x);
        load4(anchor + first, left, a);
        if (speed) load4(speed + first, left, v);
        for (u32 j = 0; j < 4; ++j) {
            const float moved = x[j];
            const bool fine = is_finite(moved);
            float step = moved;
            if (speed) {
                const float faster = add(mul(momentum, v[j]), moved);
                step = add(step, mul(momentum, faster));
                v[j] = fine ? faster : v[j];
            }
            a[j] = fine ? sub(a[j], mul(lr, step)) : a[j];
            x[j] = fine ? a[j] : moved;
            bad += !fine;
        }
        store4(values + first, left, x);
        store4(anchor + first, left, a);
        if (speed) store4(speed + first, left, v);
    });
    bad = warp_sum(bad);
    if (odd && bad && lane_of() == 0) atomicAdd(odd, bad);
}

#define OUTER(T, type) \
    KERNEL offbeat_difference_##type(T *values, const float *anchor, const tile *tiles, u32 tile_count) { \
        difference(values, anchor, tiles, tile_count); \
    } \
    KERNEL offbeat_outer_##type(T *values, float *anchor, float *speed, float lr, float momentum, const tile *tiles, \
                                u32 tile_count, u32 *odd) { \
        outer(values, anchor, speed, lr, momentum, tiles, tile_count, odd); \
    } \
    EXPORT(offbeat_difference_##type) \
    EXPORT(offbeat_outer_##type)

OUTER(float, f32)
OUTER(f16_t, f16)
OUTER(bf16_t, bf16)
