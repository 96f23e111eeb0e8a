// Two bytes an element: half precision and brain floating point, rust/core/src/codec/float16.rs and bfloat16.rs on a warp.
// A block is one element; a warp takes 256 at a time.
#include "replicas.cuh"

template <class H> struct Cast {
    static const u32 SIZE = 256, RECORD = 2 * SIZE, GROUPS = 2;
    static const bool RANDOM = false;

    struct coded {
        uint2 codes[GROUPS]; // four each
    };

    static DEVICE_MEMBER void fill(float v[GROUPS][4], u32 count) { zero_rest<Cast>(v, count); }

    static DEVICE_MEMBER void encode(const float v[GROUPS][4], u32, u64, coded &c) {
        for (u32 k = 0; k < GROUPS; ++k) c.codes[k] = bits_of<H>(v[k]);
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        for (u32 k = 0; k < GROUPS; ++k) store_bits((H *)record + place(k), left_of(count, place(k)), c.codes[k]);
    }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        for (u32 k = 0; k < GROUPS; ++k) c.codes[k] = load_bits((const H *)record + place(k), left_of(count, place(k)));
    }

    static DEVICE_MEMBER u16 bits(const coded &c, u32 k, u32 j) {
        return (u16)((j < 2 ? c.codes[k].x : c.codes[k].y) >> 16 * (j % 2));
    }

    static DEVICE_MEMBER float value(const coded &c, u32 k, u32 j) { return wide(H{bits(c, k, j)}); }

    static DEVICE_MEMBER u32 odd(const coded &c, u32 count) {
        u32 bad = 0;
        for (u32 k = 0; k < GROUPS; ++k)
            for (u32 j = 0; j < 4; ++j) bad += place(k) + j < count && !is_finite(value(c, k, j));
        return bad;
    }
};

KERNELS(Cast<f16_t>, float16)
KERNELS(Cast<bf16_t>, bfloat16)
REPLICAS(Cast<f16_t>, float16)
REPLICAS(Cast<bf16_t>, bfloat16)
