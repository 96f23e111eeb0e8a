// The largest numbers of each tensor by magnitude, and where they are: rust/core/src/codec/top_k.rs on many blocks.
//
// As on the CPU the smallest magnitude that is sent is found as a number of 31 bits, eleven and twice ten bits at a time, by
// counting how many begin with each digit. After the first digit everything that may still be sent is set aside, in order
// and tile by tile; it is little more than what is sent, so all values are read only twice. Of equal ones the first are
// taken, and nothing depends on which block is faster: blocks only add up counts.
//
// A list has values, then starts, then places, all as on the CPU. Its blocks of 65,536 numbers begin with a tile, so the
// tallies of tiles are where its starts come from.
#include "common.cuh"

// Threads of a block, which has a tile, or a tensor where tiles are summed up.
constexpr u32 GROUP = 256;
// Bins of the first digit, of 11 bits; the others have 10.
constexpr u32 BINS = 2048;
// A place in a block of numbers has so many bits.
constexpr u32 PLACE = 16;

struct span {
    u64 value;      // its first element
    u64 list;       // the first byte of its list
    u32 count;      // its elements
    u32 chosen;     // how many are sent
    u32 first_tile; // its tiles
    u32 tile_count;
};
// What is known of the smallest magnitude that is sent: how it begins, and the how-many-th from above it is of those that
// begin so. After the last digit it is that number, and how many of those that have it are sent.
struct search {
    u32 prefix;
    u32 wanted;
};
// The parts of a list. One that has all numbers has values only.
struct parts {
    u32 *values;
    u32 *starts; // how many lie before each block of numbers but the first
    u16 *places; // with a zero after the last, if they are odd
    u32 last;    // the last block of numbers
    bool is_whole;
};
struct candidate {
    u32 index; // in its tensor
    u32 bits;  // of the value
};
struct tally {
    u32 candidates; // of a tile
    u32 above;      // candidates over the smallest that is sent; later: in all tiles of the tensor before this one
    u32 equal;      // candidates that are equal to it; later: in all tiles before
    u32 unused;
};

DEVICE u32 key_of(u32 bits) { return bits & 0x7fffffffu; }
// Bits of a magnitude after the first `digits` digits.
DEVICE u32 shift_of(u32 digits) { return 30 - 10 * digits; }

// The sum of what the threads before this one have, and of all.
DEVICE u32 scan(u32 x, u32 *sums, u32 &total) {
    const u32 lane = lane_of(), warp = threadIdx.x / WARP;
    u32 sum = x;
    for (u32 d = 1; d < WARP; d *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    u32 before = sum - x;
    total = 0;
    for (u32 w = 0; w < GROUP / WARP; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    // the sums are used again
    __syncthreads();
    return before;
}

// Of a tensor that has numbers.
DEVICE parts parts_of(const u8 *lists, const span &whole) {
    parts list;
    list.values = (u32 *)(lists + whole.list);
    list.starts = list.values + whole.chosen;
    list.last = (whole.count - 1) >> PLACE;
    list.places = (u16 *)(list.starts + list.last);
    list.is_whole = whole.chosen == whole.count;
    return list;
}

DEVICE void clear(u32 *bins) {
    for (u32 bin = threadIdx.x; bin < BINS; bin += GROUP) bins[bin] = 0;
    __syncthreads();
}
DEVICE void flush(const u32 *bins, u32 *counts) {
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < BINS; bin += GROUP)
        if (bins[bin]) atomicAdd(counts + bin, bins[bin]);
}

// Four values, with the residual where there is one. What a processor makes of NaN differs, so every NaN becomes the same.
template <class T>
DEVICE void wanted4(const T *values, bool keeps, const float *residual, u64 at, u32 left, float x[4]) {
    float r[4] = {};
    load4(values + at, left, x);
    if (keeps) load4(residual + at, left, r);
    for (u32 j = 0; j < 4; ++j) {
        const float sum = keeps ? add(x[j], r[j]) : x[j];
        x[j] = is_nan(sum) ? nan() : sum;
    }
}

// Counts the first digit of everything.
template <class T> DEVICE void first(const T *values, const float *residual, const tile *tiles, u32 *counts) {
    __shared__ u32 bins[BINS];
    const tile mine = tiles[blockIdx.x];
    clear(bins);
    for (u32 at = 4 * threadIdx.x; at < mine.count; at += 4 * GROUP) {
        const u32 left = mine.count - at;
        float x[4];
        wanted4(values, residual != nullptr, residual, mine.value + at, left, x);
        for (u32 j = 0; j < 4; ++j)
            if (j < left) atomicAdd(bins + (magnitude(x[j]) >> shift_of(1)), 1u);
    }
    flush(bins, counts + (u64)BINS * mine.span);
}

// Sets aside what may still be sent, in order. The residual becomes the sum, except where that is not finite.
template <class T>
DEVICE void emit(const T *values, float *residual, const tile *tiles, const span *spans, const search *searches,
                 candidate *candidates, tally *tallies) {
    __shared__ u32 sums[GROUP / WARP];
    const tile mine = tiles[blockIdx.x];
    const u32 prefix = searches[mine.span].prefix;
    const u32 index = (u32)(mine.value - spans[mine.span].value);
    float *rest = residual + mine.value;
    candidate *room = candidates + mine.value;
    u32 emitted = 0;
    for (u32 base = 0; base < mine.count; base += 4 * GROUP) {
        const u32 at = base + 4 * threadIdx.x, left = left_of(mine.count, at);
        float x[4];
        wanted4(values, residual != nullptr, residual, mine.value + at, left, x);
        u32 mask = 0;
        for (u32 j = 0; j < 4; ++j) mask |= (u32)(j < left && magnitude(x[j]) >> shift_of(1) >= prefix) << j;
        u32 total;
        u32 to = emitted + scan(__popc(mask), sums, total);
        for (u32 j = 0; j < 4; ++j)
            if (mask >> j & 1u) {
                uint2 one;
                one.x = index + at + j, one.y = __float_as_uint(x[j]);
                *(uint2 *)(room + to++) = one;
            }
        emitted += total;
        if (!residual) continue;
        if (is_finite(x[0]) && is_finite(x[1]) && is_finite(x[2]) && is_finite(x[3])) {
            store4(rest + at, left, x);
        } else {
            for (u32 j = 0; j < 4; ++j)
                if (j < left && is_finite(x[j])) rest[at + j] = x[j];
        }
    }
    if (threadIdx.x == 0) tallies[blockIdx.x].candidates = emitted;
}

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

// Appends the next digit to what is known, and clears the counts.
KERNEL offbeat_top_k_narrow(const span *spans, u32 *counts, search *searches, u32 digit) {
    __shared__ u32 sums[GROUP / WARP];
    const search known = searches[blockIdx.x];
    const u32 chosen = spans[blockIdx.x].chosen;
    const u32 wanted = digit == 0 ? chosen : known.wanted;
    uint4 *mine = (uint4 *)(counts + (u64)BINS * blockIdx.x) + 2 * threadIdx.x;
    const uint4 low = mine[0], high = mine[1];
    const u32 bins[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4 zero;
    zero.x = zero.y = zero.z = zero.w = 0;
    mine[0] = mine[1] = zero;
    u32 sum = 0, total;
    for (u32 bin = 0; bin < 8; ++bin) sum += bins[bin];
    const u32 before = scan(sum, sums, total);
    u32 rest = wanted - (total - before - sum);
    // an empty tensor: nothing is sent
    if (wanted == 0 && threadIdx.x == 0) {
        search none;
        none.prefix = none.wanted = 0;
        searches[blockIdx.x] = none;
    }
    if (total - before - sum >= wanted || rest > sum) return;
    bool found = false;
    search next;
    next.prefix = next.wanted = 0;
#pragma unroll
    for (u32 back = 0; back < 8; ++back) {
        const u32 bin = 7 - back;
        if (!found && bins[bin] >= rest) {
            found = true;
            next.prefix = (digit == 0 ? 0 : known.prefix << 10) | (8 * threadIdx.x + bin);
            next.wanted = rest;
        }
        if (!found) rest -= bins[bin];
    }
    searches[blockIdx.x] = next;
}

// Counts the next digit of those that begin like the smallest that is sent.
KERNEL offbeat_top_k_count(const tile *tiles, const candidate *candidates, const tally *tallies, const search *searches,
                           u32 *counts, u32 digit) {
    __shared__ u32 bins[BINS];
    const tile mine = tiles[blockIdx.x];
    const u32 prefix = searches[mine.span].prefix, count = tallies[blockIdx.x].candidates;
    clear(bins);
    for (u32 at = threadIdx.x; at < count; at += GROUP) {
        const u32 key = key_of(candidates[mine.value + at].bits);
        if (key >> shift_of(digit) == prefix) atomicAdd(bins + (key >> shift_of(digit + 1) & 1023u), 1u);
    }
    flush(bins, counts + (u64)BINS * mine.span);
}

// Counts what each tile has over the smallest that is sent, and what is equal to it.
KERNEL offbeat_top_k_tally(const tile *tiles, const candidate *candidates, const search *searches, tally *tallies) {
    __shared__ u32 sums[GROUP / WARP];
    const tile mine = tiles[blockIdx.x];
    const u32 least = searches[mine.span].prefix, count = tallies[blockIdx.x].candidates;
    u32 found = 0;
    for (u32 at = threadIdx.x; at < count; at += GROUP) {
        const u32 key = key_of(candidates[mine.value + at].bits);
        found += key > least ? 1u << 16 : key == least;
    }
    u32 total;
    scan(found, sums, total);
    if (threadIdx.x == 0) {
        tallies[blockIdx.x].above = total >> 16;
        tallies[blockIdx.x].equal = total & 0xffffu;
    }
}

// Replaces the counts of tiles by those of all tiles before.
KERNEL offbeat_top_k_place(const span *spans, tally *tallies) {
    __shared__ u32 sums[GROUP / WARP];
    const span mine = spans[blockIdx.x];
    u32 above = 0, equal = 0;
    for (u32 base = 0; base < mine.tile_count; base += GROUP) {
        const u32 at = base + threadIdx.x;
        tally *own = tallies + mine.first_tile + at;
        const bool there = at < mine.tile_count;
        u32 all_above, all_equal;
        const u32 before = above + scan(there ? own->above : 0, sums, all_above);
        const u32 same = equal + scan(there ? own->equal : 0, sums, all_equal);
        if (there) own->above = before, own->equal = same;
        above += all_above;
        equal += all_equal;
    }
}

// Writes the lists. What is sent is not kept, except where it is not finite.
KERNEL offbeat_top_k_gather(const tile *tiles, const span *spans, const candidate *candidates, const tally *tallies,
                            const search *searches, u8 *lists, float *residual, u32 *odd) {
    __shared__ u32 sums[GROUP / WARP];
    const tile mine = tiles[blockIdx.x];
    const span whole = spans[mine.span];
    const search last = searches[mine.span];
    const tally before = tallies[blockIdx.x];
    const parts list = parts_of(lists, whole);
    if (threadIdx.x == 0 && !list.is_whole) {
        const u32 index = (u32)(mine.value - whole.value), block = index >> PLACE;
        if (index == 0 && whole.chosen % 2) list.places[whole.chosen] = 0;
        if (block > 0 && index == block << PLACE) list.starts[block - 1] = before.above + min(before.equal, last.wanted);
    }
    u32 above = before.above, equal = before.equal;
    for (u32 base = 0; base < before.candidates; base += GROUP) {
        const u32 at = base + threadIdx.x;
        uint2 one;
        one.x = one.y = 0;
        if (at < before.candidates) one = *(const uint2 *)(candidates + mine.value + at);
        const bool there = at < before.candidates, over = there && key_of(one.y) > last.prefix;
        const bool same = there && key_of(one.y) == last.prefix;
        u32 total;
        const u32 sum = scan(over ? 1u << 16 : same, sums, total);
        const u32 equal_before = equal + (sum & 0xffffu);
        if (over || (same && equal_before < last.wanted)) {
            const u32 to = above + (sum >> 16) + min(equal_before, last.wanted);
            const bool finite = is_finite(__uint_as_float(one.y));
            list.values[to] = one.y;
            if (!list.is_whole) list.places[to] = (u16)one.x;
            if (residual && finite) residual[whole.value + one.x] = 0.0f;
            if (odd && !finite) atomicAdd(odd, 1u);
        }
        above += total >> 16;
        equal += total & 0xffffu;
    }
}

// Writes or adds what lists hold for some numbers: those of a block, or any of a list that has all. What comes from elsewhere
// is believed only if it is what we would have written.
template <bool ADD, class T>
DEVICE void scatter(const u8 *lists, const span *spans, const tile *targets, T *values, u32 *odd) {
    const tile mine = targets[blockIdx.x];
    const span whole = spans[mine.span];
    const parts list = parts_of(lists, whole);
    const u32 index = (u32)(mine.value - whole.value), block = index >> PLACE;
    u32 first = index, count = mine.count;
    if (!list.is_whole) {
        first = block == 0 ? 0 : list.starts[block - 1];
        const u32 end = block == list.last ? whole.chosen : list.starts[block];
        const bool follow = first <= end && end <= whole.chosen && end - first <= mine.count;
        const bool is_padded = block > 0 || whole.chosen % 2 == 0 || list.places[whole.chosen] == 0;
        if (threadIdx.x == 0 && odd && !(follow && is_padded)) atomicAdd(odd, 1u);
        count = follow ? end - first : 0;
    }
    const u32 *bits = list.values + first;
    const u16 *places = list.places + first;
    for (u32 base = 0; base < count; base += GROUP) {
        const u32 at = base + threadIdx.x;
        const bool there = at < count;
        u32 place = at;
        if (!list.is_whole) {
            place = there ? places[at] : 0;
            u32 last = __shfl_up_sync(ALL, place, 1);
            if (lane_of() == 0 && there && at > 0) last = *(places + at - 1);
            if (there && (place >= mine.count || (at > 0 && place <= last))) {
                if (odd) atomicAdd(odd, 1u);
                continue;
            }
        }
        if (!there) continue;
        T *to = values + mine.value + place;
        const float value = __uint_as_float(bits[at]);
        narrow(ADD ? add(wide(*to), value) : value, *to);
    }
}

#define TOP_K(T, type) \
    KERNEL offbeat_top_k_first_##type(const T *values, const float *residual, const tile *tiles, u32 *counts) { \
        first(values, residual, tiles, counts); \
    } \
    KERNEL offbeat_top_k_emit_##type(const T *values, float *residual, const tile *tiles, const span *spans, \
                                     const search *searches, candidate *candidates, tally *tallies) { \
        emit(values, residual, tiles, spans, searches, candidates, tallies); \
    } \
    KERNEL offbeat_top_k_decode_##type(const u8 *lists, const span *spans, const tile *targets, T *values, u32 *odd) { \
        scatter<false>(lists, spans, targets, values, odd); \
    } \
    KERNEL offbeat_top_k_add_##type(const u8 *lists, const span *spans, const tile *targets, T *values, u32 *odd) { \
        scatter<true>(lists, spans, targets, values, odd); \
    } \
    EXPORT(offbeat_top_k_first_##type) \
    EXPORT(offbeat_top_k_emit_##type) \
    EXPORT(offbeat_top_k_decode_##type) \
    EXPORT(offbeat_top_k_add_##type)

TOP_K(float, f32)
TOP_K(f16_t, f16)
TOP_K(bf16_t, bf16)
EXPORT(offbeat_top_k_narrow)
EXPORT(offbeat_top_k_count)
EXPORT(offbeat_top_k_tally)
EXPORT(offbeat_top_k_place)
EXPORT(offbeat_top_k_gather)
