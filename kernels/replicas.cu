// Gossip by differences that travel as they are: four bytes an element.
#include "replicas.cuh"

struct Plain {
    static const u32 SIZE = 256, RECORD = 4 * SIZE, GROUPS = 2;
    static const bool RANDOM = false;

    struct coded {
        float v[GROUPS][4];
    };

    static DEVICE_MEMBER void fill(float v[GROUPS][4], u32 count) { zero_rest<Plain>(v, count); }

    static DEVICE_MEMBER void encode(const float v[GROUPS][4], u32, u64, coded &c) {
        for (u32 k = 0; k < GROUPS; ++k)
            for (u32 j = 0; j < 4; ++j) c.v[k][j] = v[k][j];
    }

    static DEVICE_MEMBER void write(const coded &c, u32 count, u8 *record) {
        store_known<Plain>((float *)record, count, c.v);
    }

    static DEVICE_MEMBER void read(const u8 *record, u32 count, coded &c) {
        load_known<Plain>((const float *)record, count, c.v);
    }

    static DEVICE_MEMBER float value(const coded &c, u32 k, u32 j) { return c.v[k][j]; }

    // nothing is encoded, so nobody asks
    static DEVICE_MEMBER u32 odd(const coded &, u32) { return 0; }
};

REPLICAS(Plain, plain)
