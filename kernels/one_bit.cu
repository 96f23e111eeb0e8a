// One bit an element, its sign, and the mean magnitude of a block of 2048: rust/core/src/codec/one_bit.rs on a warp.
//
// Lane l sums the magnitudes of the elements l, l + 32, l + 64, ... in this order, but memory is read in fours; so a block
// stands in shared memory while it is encoded. A word of signs is what a vote of the lanes gives.
#include "replicas.cuh"

struct OneBit {
    static const u32 SIZE = 2048, HEAD = 4, RECORD = HEAD + SIZE / 8, ROUNDS = SIZE / (4 * WARP);

    struct coded {
        float scale;  // NaN: not finite
        u32 signs[2]; // lane l has the words l and l + 32
    };

    static DEVICE_MEMBER void encode(const float *block, u32 count, coded &c) {
        float sum = 0.0f;
        for (u32 half = 0; half < 2; ++half) {
            u32 mine = 0;
#pragma unroll 8
            for (u32 word = 0; word < WARP; ++word) {
                const float x = block[WARP * (WARP * half + word) + lane_of()];
                sum = add(sum, fabsf(x));
                const u32 signs = __ballot_sync(ALL, __float_as_uint(x) >> 31);
                if (lane_of() == word) mine = signs;
            }
            c.signs[half] = mine;
        }
        sum = warp_sum(sum);
        c.scale = is_finite(sum) ? div(sum, (float)count) : huge_mean(block, count);
        if (is_nan(c.scale)) {
            c.scale = nan();
            c.signs[0] = c.signs[1] = 0;
        }
    }

    // The mean of magnitudes whose sum overflows, from the same tree over smaller numbers; NaN if one is not finite.
    static DEVICE_MEMBER float huge_mean(const float *block, u32 count) {
        float sum = 0.0f;
        for (u32 at = lane_of(); at < SIZE; at += WARP) {
            // the second product is NaN for an infinity
            sum = add(sum, add(mul(fabsf(block[at]), 1.0f / SIZE), mul(block[at], 0.0f)));
        }
        const float mean = mul(div(warp_sum(sum), (float)count), (float)SIZE);
        // rounding may carry a mean of the largest numbers beyond them
        return is_nan(mean) ? mean : fminf(mean, (float)LARGEST);
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        if (lane_of() == 0) *(float *)record = c.scale;
        u32 *words = (u32 *)(record + HEAD);
        const u32 bytes = (count + 7) / 8;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 word = WARP * half + lane_of();
            if (4 * word + 4 <= bytes) {
                words[word] = c.signs[half];
            } else {
                for (u32 b = 4 * word; b < bytes; ++b) ((u8 *)words)[b] = (u8)(c.signs[half] >> 8 * (b % 4));
            }
        }
    }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        c.scale = *(const float *)record;
        const u32 *words = (const u32 *)(record + HEAD);
        const u32 bytes = (count + 7) / 8;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 word = WARP * half + lane_of();
            c.signs[half] = 0;
            if (4 * word + 4 <= bytes) {
                c.signs[half] = words[word];
            } else {
                for (u32 b = 4 * word; b < bytes; ++b) c.signs[half] |= (u32)((const u8 *)words)[b] << 8 * (b % 4);
            }
        }
    }

    // A lane's four neighbours of the k-th round. All lanes ask together.
    static DEVICE_MEMBER void values(const coded &c, u32 k, float to[4]) {
        const u32 word = place(k) / WARP;
        const u32 low = __shfl_sync(ALL, c.signs[0], word % WARP), high = __shfl_sync(ALL, c.signs[1], word % WARP);
        const u32 signs = (word < WARP ? low : high) >> place(k) % WARP;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) to[j] = __uint_as_float(__float_as_uint(c.scale) ^ (signs >> j & 1u) << 31);
    }

    // Encodes a block whose values stand in shared memory, each four where the lane put them that reads them here.
    static DEVICE_MEMBER void seal(float *block, u32 count, bool keeps, float *residual, u8 *record, u32 *odd) {
        if (keeps) {
#pragma unroll 4
            for (u32 k = 0; k < ROUNDS; ++k) {
                float r[4];
                load4(residual + place(k), left_of(count, place(k)), r);
                for (u32 j = 0; j < 4; ++j) block[place(k) + j] = add(block[place(k) + j], r[j]);
            }
        }
        __syncwarp();
        coded c;
        encode(block, count, c);
        write(c, count, record);
        if (keeps) {
#pragma unroll 4
            for (u32 k = 0; k < ROUNDS; ++k) {
                float x[4], sent[4];
                for (u32 j = 0; j < 4; ++j) x[j] = block[place(k) + j];
                values(c, k, sent);
                store_rest4(residual + place(k), left_of(count, place(k)), x, sent);
            }
        }
        if (odd && lane_of() == 0 && !is_finite(c.scale)) atomicAdd(odd, 1u);
        // the next block comes to the same place
        __syncwarp();
    }
};

// A block of each warp.
#define ROOM \
    __shared__ __align__(16) float room[THREADS / WARP][OneBit::SIZE]; \
    float *block = room[threadIdx.x / WARP]

template <> struct Loops<OneBit> {
    template <class S>
    static DEVICE_MEMBER void encode(S source, float *residual, const tile *tiles, u32 tile_count, u8 *records,
                                     const u64 *, u64, u32 *odd) {
        ROOM;
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        u8 *record = records + mine.record;
        for (u32 at = 0; at < mine.count; at += OneBit::SIZE, record += OneBit::RECORD) {
            const u32 count = min(mine.count - at, OneBit::SIZE);
            const u64 first = mine.value + at;
#pragma unroll 4
            for (u32 k = 0; k < OneBit::ROUNDS; ++k) {
                float x[4];
                source.load(first + place(k), left_of(count, place(k)), x);
                *(uint4 *)(block + place(k)) = raw_of(x);
            }
            OneBit::seal(block, count, residual != nullptr, residual + first, record, odd);
        }
    }

    template <bool ADD, class T>
    static DEVICE_MEMBER void decode(const u8 *records, const tile *tiles, u32 tile_count, T *values) {
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        const u8 *record = records + mine.record;
        for (u32 at = 0; at < mine.count; at += OneBit::SIZE, record += OneBit::RECORD) {
            const u32 count = min(mine.count - at, OneBit::SIZE);
            OneBit::coded c;
            OneBit::read(record, count, c);
#pragma unroll 4
            for (u32 k = 0; k < OneBit::ROUNDS; ++k) {
                T *to = values + mine.value + at + place(k);
                float x[4], sent[4];
                OneBit::values(c, k, sent);
                if (ADD) load4(to, left_of(count, place(k)), x);
                for (u32 j = 0; j < 4; ++j) x[j] = ADD ? add(x[j], sent[j]) : sent[j];
                store4(to, left_of(count, place(k)), x);
            }
        }
    }

    static DEVICE_MEMBER void average(const u8 *shares, u64 stride, u32 peers, float divisor, float *residual,
                                      const tile *tiles, u32 tile_count, u8 *records, const u64 *, u64, u32 *odd) {
        ROOM;
        tile mine;
        if (!find_tile(tiles, tile_count, mine)) return;
        u64 record = mine.record;
        for (u32 at = 0; at < mine.count; at += OneBit::SIZE, record += OneBit::RECORD) {
            const u32 count = min(mine.count - at, OneBit::SIZE);
            for (u32 peer = 0; peer < peers; ++peer) {
                OneBit::coded c;
                OneBit::read(shares + peer * stride + record, count, c);
#pragma unroll 4
                for (u32 k = 0; k < OneBit::ROUNDS; ++k) {
                    float x[4];
                    OneBit::values(c, k, x);
                    for (u32 j = 0; j < 4; ++j) {
                        const float sum = peer == 0 ? x[j] : add(block[place(k) + j], x[j]);
                        const float mean = peer + 1 == peers ? div(sum, divisor) : sum;
                        block[place(k) + j] = place(k) + j < count ? mean : 0.0f;
                    }
                }
            }
            OneBit::seal(block, count, residual != nullptr, residual + mine.value + at, records + record, odd);
        }
    }
};

template <> struct Reader<OneBit> {
    static const u32 SIZE = 4 * WARP, GROUPS = 1;

    struct coded {
        float scale; // NaN: not finite
        u32 signs;   // of a lane's four neighbours
    };

    static DEVICE_MEMBER void read(const u8 *records, u32 at, u32 count, coded &c) {
        const u8 *record = records + at / OneBit::SIZE * OneBit::RECORD;
        c.scale = *(const float *)record;
        const u32 byte = (at % OneBit::SIZE + place(0)) / 8;
        c.signs = place(0) < count ? record[OneBit::HEAD + byte] >> place(0) % 8 : 0;
    }

    static DEVICE_MEMBER void values(const coded &c, u32, float to[4]) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) to[j] = __uint_as_float(__float_as_uint(c.scale) ^ (c.signs >> j & 1u) << 31);
    }
};

KERNELS(OneBit, onebit)
REPLICAS(OneBit, onebit)
