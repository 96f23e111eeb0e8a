// Stochastic rounding to 127 levels of either sign, for a block of 512: rust/core/src/codec/qsgd.rs on a warp.
//
// The 64 random bits that counter i draws serve the elements i and i + 256, which one lane has.
#include "replicas.cuh"

struct Qsgd {
    static const u32 SIZE = 512, HEAD = 4, RECORD = HEAD + SIZE, GROUPS = 4;
    static const bool RANDOM = true;

    struct coded {
        float step;        // NaN: not finite
        u32 codes[GROUPS]; // four each
    };

    static DEVICE_MEMBER void fill(float v[GROUPS][4], u32 count) { zero_rest<Qsgd>(v, count); }

    static DEVICE_MEMBER void encode(const float v[GROUPS][4], u32, u64 key, coded &c) {
        const u32 largest = largest_of<Qsgd>(v);
        for (u32 k = 0; k < GROUPS; ++k) c.codes[k] = 0;
        c.step = nan();
        if (largest >= 0x7f800000u) return;
        c.step = symmetric_step(__uint_as_float(largest), 127.0);
        const float factor = inverse(c.step);
        for (u32 k = 0; k < GROUPS / 2; ++k)
            for (u32 j = 0; j < 4; ++j) {
                const u64 bits = draw(key, place(k) + j);
                c.codes[k] |= dither(v[k][j], factor, (u32)bits >> 8) << 8 * j;
                c.codes[k + 2] |= dither(v[k + 2][j], factor, (u32)(bits >> 40)) << 8 * j;
            }
    }

    // The code of a number that is rounded up or down as 24 random bits say.
    static DEVICE_MEMBER u32 dither(float x, float factor, u32 random) {
        const float steps = fminf(mul(fabsf(x), factor), 127.0f);
        const float near = nearest(steps);
        const float floor = near > steps ? sub(near, 1.0f) : near;
        const float up = mul((float)random, 1.0f / 16777216.0f) < sub(steps, floor) ? 1.0f : 0.0f;
        const float level = add(floor, up);
        return to_byte(add(__float_as_uint(x) >> 31 ? -level : level, 128.0f));
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        if (lane_of() == 0) *(float *)record = c.step;
        write_bytes<Qsgd>(c.codes, count, record + HEAD);
    }

    static DEVICE_MEMBER void read_head(const u8 *record, coded &c) { c.step = *(const float *)record; }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        read_head(record, c);
        read_bytes<Qsgd>(record + HEAD, count, c.codes);
    }

    static DEVICE_MEMBER float value(const coded &c, u32 k, u32 j) {
        return mul(sub(from_byte(c.codes[k], j), 128.0f), c.step);
    }

    static DEVICE_MEMBER u32 odd(const coded &c, u32) { return lane_of() == 0 && !is_finite(c.step); }
};

template <> struct Reader<Qsgd> : ByteReader<Qsgd> {};

KERNELS(Qsgd, qsgd)
REPLICAS(Qsgd, qsgd)
