// Eight bits between the least and the largest number of a block of 256: rust/core/src/codec/min_max8.rs on a warp.
#include "replicas.cuh"

struct MinMax8 {
    static const u32 SIZE = 256, HEAD = 8, RECORD = HEAD + SIZE, GROUPS = 2;
    static const bool RANDOM = false;

    struct coded {
        float step;        // NaN: not finite; negative: huge
        float low;         // as the record has it: the low end of the grid, or the least number where it is huge
        double start;      // the low end of the grid where it is huge
        u32 codes[GROUPS]; // four each
    };

    // Beyond the end stands the first number, which changes neither end of the range.
    static DEVICE_MEMBER void fill(float v[GROUPS][4], u32 count) {
        const float first = __shfl_sync(ALL, v[0][0], 0);
        for (u32 k = 0; k < GROUPS; ++k)
            for (u32 j = 0; j < 4; ++j)
                if (place(k) + j >= count) v[k][j] = first;
    }

    // The low end of the grid: the least number, moved by at most half a step so that zero is on the grid if the block
    // reaches it.
    static DEVICE_MEMBER double low_end(float least, float step) {
        const bool reaches = least <= 0.0f && add((double)least, mul(255.0, (double)step)) >= 0.0;
        const double moved = sub(0.0, mul((double)nearest(mul(-least, inverse(step))), (double)step));
        return reaches && step > 0.0f ? moved : (double)least;
    }

    static DEVICE_MEMBER void encode(const float v[GROUPS][4], u32, u64, coded &c) {
        float least = (float)LARGEST, most = -(float)LARGEST;
        bool finite = true;
        for (u32 k = 0; k < GROUPS; ++k)
            for (u32 j = 0; j < 4; ++j) {
                least = fminf(least, v[k][j]);
                most = fmaxf(most, v[k][j]);
                finite = finite && is_finite(v[k][j]);
            }
        // zeros of both signs are equal, and which one is found depends on the order
        least = add(warp_min(least), 0.0f);
        most = add(warp_max(most), 0.0f);
        if (__ballot_sync(ALL, finite) != ALL) {
            c.step = nan();
            c.low = 0.0f;
            for (u32 k = 0; k < GROUPS; ++k) c.codes[k] = 0;
            return;
        }
        const float step = grid_step(mul(sub((double)most, (double)least), 1.0 / 255.0));
        c.start = low_end(least, step);
        // from 2^125 on the sums below could overflow
        const bool huge = most >= 4.2535296e37f || least <= -4.2535296e37f;
        if (huge) {
            c.step = -step;
            c.low = least;
            for (u32 k = 0; k < GROUPS; ++k) c.codes[k] = huge_codes(v[k], c.start, (double)step);
            return;
        }
        c.step = step;
        c.low = __double2float_rn(c.start);
        const float factor = inverse(step);
        for (u32 k = 0; k < GROUPS; ++k) {
            c.codes[k] = 0;
            for (u32 j = 0; j < 4; ++j) c.codes[k] |= to_byte(mul(sub(v[k][j], c.low), factor)) << 8 * j;
        }
    }

    static DEVICE_MEMBER u32 huge_codes(const float v[4], double low, double step) {
        u32 codes = 0;
        for (u32 j = 0; j < 4; ++j) {
            const double steps = step > 0.0 ? div(sub((double)v[j], low), step) : 0.0;
            const int code = __double2int_rn(steps);
            codes |= (u32)(code < 0 ? 0 : code > 255 ? 255 : code) << 8 * j;
        }
        return codes;
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        const u32 lane = lane_of();
        if (lane < 2) ((float *)record)[lane] = lane == 0 ? c.step : c.low;
        write_bytes<MinMax8>(c.codes, count, record + HEAD);
    }

    static DEVICE_MEMBER void read_head(const u8 *record, coded &c) {
        c.step = ((const float *)record)[0];
        c.low = ((const float *)record)[1];
        c.start = c.step < 0.0f ? low_end(c.low, -c.step) : 0.0;
    }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        read_head(record, c);
        read_bytes<MinMax8>(record + HEAD, count, c.codes);
    }

    static DEVICE_MEMBER float value(const coded &c, u32 k, u32 j) {
        const float code = from_byte(c.codes[k], j);
        if (!(c.step < 0.0f)) return add(c.low, mul(code, c.step));
        const double exact = add(c.start, mul((double)code, (double)-c.step));
        // half a step outside may be beyond what there is
        return __double2float_rn(exact < -LARGEST ? -LARGEST : exact > LARGEST ? LARGEST : exact);
    }

    static DEVICE_MEMBER u32 odd(const coded &c, u32) { return lane_of() == 0 && !is_finite(c.step); }
};

template <> struct Reader<MinMax8> : ByteReader<MinMax8> {};

KERNELS(MinMax8, minmax8)
REPLICAS(MinMax8, minmax8)
