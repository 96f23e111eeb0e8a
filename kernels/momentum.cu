// Gradients as the momentum that they make, and back: rust/core/src/algorithm/momentum.rs. A tensor has a beta of its own.
#include "blocks.cuh"

template <class T>
DEVICE void momentum(T *values, const float *kept, const float *betas, const tile *tiles, u32 tile_count) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    const float beta = betas[mine.span], rest = sub(1.0f, beta);
    by_fours<4>(mine, [&](u32 at, u32 left) {
        const u64 first = mine.value + at;
        float x[4], m[4];
        load4(values + first, left, x);
        load4(kept + first, left, m);
        for (u32 j = 0; j < 4; ++j) x[j] = add(mul(beta, m[j]), mul(rest, x[j]));
        store4(values + first, left, x);
    });
}

template <class T>
DEVICE void gradient(T *values, float *kept, const float *betas, const tile *tiles, u32 tile_count) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    const float beta = betas[mine.span], rest = sub(1.0f, beta);
    by_fours<2>(mine, [&](u32 at, u32 left) {
        const u64 first = mine.value + at;
        float x[4], m[4];
        load4(values + first, left, x);
        load4(kept + first, left, m);
        for (u32 j = 0; j < 4; ++j) {
            const float made = x[j];
            x[j] = div(sub(made, mul(beta, m[j])), rest);
            // a bad round leaves the momentum as it was
            m[j] = is_finite(made) ? made : m[j];
        }
        store4(values + first, left, x);
        store4(kept + first, left, m);
    });
}

#define MOMENTUM(T, type) \
    KERNEL offbeat_momentum_##type(T *values, const float *kept, const float *betas, const tile *tiles, \
                                   u32 tile_count) { \
        momentum(values, kept, betas, tiles, tile_count); \
    } \
    KERNEL offbeat_gradient_##type(T *values, float *kept, const float *betas, const tile *tiles, u32 tile_count) { \
        gradient(values, kept, betas, tiles, tile_count); \
    } \
    EXPORT(offbeat_momentum_##type) \
    EXPORT(offbeat_gradient_##type)

MOMENTUM(float, f32)
MOMENTUM(f16_t, f16)
MOMENTUM(bf16_t, bf16)
