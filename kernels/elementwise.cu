// What algorithms do to values between exchanges: in f32, rounded once to their type.
#include "blocks.cuh"

template <class T> DEVICE void divide(T *values, const tile *tiles, u32 tile_count, float divisor) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    T *first = values + mine.value;
    by_fours<4>(mine, [&](u32 at, u32 left) {
        float x[4];
        load4(first + at, left, x);
        for (u32 j = 0; j < 4; ++j) x[j] = div(x[j], divisor);
        store4(first + at, left, x);
    });
}

// Sums arrays in their order, each multiplied by its factor if there are any, and divides the sum.
template <class F, class T>
DEVICE void mix(const F *sources, u64 stride, u32 peers, const float *factors, float divisor, const tile *tiles,
                u32 tile_count, T *values) {
    tile mine;
    if (!find_tile(tiles, tile_count, mine)) return;
    by_fours<2>(mine, [&](u32 at, u32 left) {
        float sum[4] = {};
        for (u32 peer = 0; peer < peers; ++peer) {
            const bool weighs = factors != nullptr;
            const float factor = weighs ? factors[peer] : 1.0f;
            float x[4];
            load4(sources + peer * stride + mine.record + at, left, x);
            for (u32 j = 0; j < 4; ++j) {
                const float term = weighs ? mul(x[j], factor) : x[j];
                sum[j] = peer == 0 ? term : add(sum[j], term);
            }
        }
        for (u32 j = 0; j < 4; ++j) sum[j] = div(sum[j], divisor);
        store4(values + mine.value + at, left, sum);
    });
}

#define DIVIDE(T, type) \
    KERNEL offbeat_divide_##type(T *values, const tile *tiles, u32 tile_count, float divisor) { \
        divide(values, tiles, tile_count, divisor); \
    } \
    EXPORT(offbeat_divide_##type)

#define MIX(F, from, T, to) \
    KERNEL offbeat_mix_##from##_##to(const F *sources, u64 stride, u32 peers, const float *factors, float divisor, \
                                     const tile *tiles, u32 tile_count, T *values) { \
        mix(sources, stride, peers, factors, divisor, tiles, tile_count, values); \
    } \
    EXPORT(offbeat_mix_##from##_##to)

DIVIDE(float, f32)
DIVIDE(f16_t, f16)
DIVIDE(bf16_t, bf16)
MIX(float, f32, float, f32)
MIX(float, f32, f16_t, f16)
MIX(float, f32, bf16_t, bf16)
MIX(f16_t, f16, float, f32)
MIX(f16_t, f16, f16_t, f16)
MIX(bf16_t, bf16, float, f32)
MIX(bf16_t, bf16, bf16_t, bf16)
