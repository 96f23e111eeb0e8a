// Four bits an element: fifteen levels around zero, for a block of 128: rust/core/src/codec/int4.rs on a warp.
#include "replicas.cuh"

struct Int4 {
    static const u32 SIZE = 128, HEAD = 4, RECORD = HEAD + SIZE / 2, GROUPS = 1;
    static const bool RANDOM = false;

    struct coded {
        float step; // NaN: not finite
        u32 codes;  // four, of four bits each
    };

    // Zeros stand there already.
    static DEVICE_MEMBER void fill(float v[GROUPS][4], u32 count) { zero_rest<Int4>(v, count); }

    static DEVICE_MEMBER void encode(const float v[GROUPS][4], u32, u64, coded &c) {
        const u32 largest = largest_of<Int4>(v);
        c.codes = 0;
        c.step = nan();
        if (largest >= 0x7f800000u) return;
        c.step = symmetric_step(__uint_as_float(largest), 7.0);
        const float factor = inverse(c.step);
        for (u32 j = 0; j < 4; ++j) c.codes |= to_byte(add(mul(v[0][j], factor), 8.0f)) << 4 * j;
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        const u32 lane = lane_of(), bytes = (count + 1) / 2;
        if (lane == 0) *(float *)record = c.step;
        record += HEAD;
        if (2 * lane + 2 <= bytes) {
            ((u16 *)record)[lane] = (u16)c.codes;
        } else if (2 * lane < bytes) {
            record[2 * lane] = (u8)c.codes;
        }
    }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        const u32 lane = lane_of(), bytes = (count + 1) / 2;
        c.step = *(const float *)record;
        record += HEAD;
        c.codes = 0;
        if (2 * lane + 2 <= bytes) {
            c.codes = ((const u16 *)record)[lane];
        } else if (2 * lane < bytes) {
            c.codes = record[2 * lane];
        }
    }

    static DEVICE_MEMBER float value(const coded &c, u32, u32 j) {
        return mul(sub((float)(c.codes >> 4 * j & 15u), 8.0f), c.step);
    }

    static DEVICE_MEMBER u32 odd(const coded &c, u32) { return lane_of() == 0 && !is_finite(c.step); }
};

KERNELS(Int4, int4)
REPLICAS(Int4, int4)
