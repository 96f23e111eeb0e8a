// Matrices as products of thin factors: rust/core/src/codec/low_rank.rs on many blocks.
//
// M, the sum of values and of what was left, is nowhere in memory: each kernel adds it up as it reads. Sums have the order
// of the CPU (factors.rs, orthonormal.rs), which leaves all the parallelism that is needed: of P the lanes of a row and all
// rows, of Q the columns and runs of 64 rows, of which a block adds the sums in order. So nothing is set aside in memory.
#include "common.cuh"

// Threads of a block.
constexpr u32 GROUP = 512;
constexpr u32 WARPS = GROUP / WARP;
// Columns of a factor that are summed in one pass over M.
constexpr u32 FEW = 4, MANY = 8;

// A matrix and its factors, which are kept column by column.
struct matrix {
    u64 value; // its first element, in values and residuals
    u64 left;  // P's first number
    u64 right; // Q's first number
    u32 rows;
    u32 cols;
    u32 rank;
    u32 unused;
};

// Whether any thread of the block says so.
DEVICE bool any(bool mine, u32 *votes) {
    const u32 vote = __ballot_sync(ALL, mine);
    if (lane_of() == 0) votes[threadIdx.x / WARP] = vote;
    __syncthreads();
    u32 all = 0;
    for (u32 warp = 0; warp < WARPS; ++warp) all |= votes[warp];
    // the votes are used again
    __syncthreads();
    return all != 0;
}

// P = M * Q. The products of a row go to 8 lanes, for 1024 columns at a time. A thread is a lane of a row.
constexpr u32 LANES = 8, TILE = 1024;

// Columns of P from `first` on, at most R; `row` is none if it is beyond the last one.
template <u32 R, class T>
DEVICE void left(const T *values, const float *residual, const matrix &of, u32 row, u32 first, const float *q, float *p) {
    const u32 lane = threadIdx.x % LANES, count = of.rank - first;
    const u64 start = of.value + (u64)row * of.cols;
    const bool is_there = row < of.rows;
    float sums[R] = {};
    for (u32 tile = 0; tile < of.cols; tile += TILE) {
        const u32 end = is_there ? min(tile + TILE, of.cols) : 0;
        float part[R] = {};
#pragma unroll 4
        for (u32 col = tile + lane; col < end; col += LANES) {
            const float m = add(wide(values[start + col]), residual[start + col]);
#pragma unroll
            for (u32 c = 0; c < R; ++c)
                if (c < count) part[c] = add(part[c], mul(m, q[(u64)(first + c) * of.cols + col]));
        }
#pragma unroll
        for (u32 c = 0; c < R; ++c) {
            for (u32 d = LANES / 2; d > 0; d /= 2) part[c] = add(part[c], __shfl_xor_sync(ALL, part[c], d));
            sums[c] = add(sums[c], part[c]);
        }
    }
#pragma unroll
    for (u32 c = 0; c < R; ++c)
        if (is_there && c < count && lane == c % LANES) p[(u64)(first + c) * of.rows + row] = sums[c];
}

template <class T>
DEVICE void left_of(const T *values, const float *residual, const matrix *matrices, const tile *tiles, const float *factors,
                    float *p) {
    const tile mine = tiles[blockIdx.x];
    const matrix of = matrices[mine.span];
    const u32 row = (u32)mine.value + threadIdx.x / LANES;
    const float *q = factors + of.right;
    if (of.rank <= FEW) return left<FEW>(values, residual, of, row, 0, q, p + of.left);
    for (u32 first = 0; first < of.rank; first += MANY) left<MANY>(values, residual, of, row, first, q, p + of.left);
}

// Q = M^T * P. An element adds its products in order, for 64 rows at a time. A thread has a column and every eighth such
// run; the sums of eight runs are added together.
constexpr u32 RUN = 64, STRIP = 64, RUNS = GROUP / STRIP;

// Columns of Q from `first` on, at most R. `parts` has the sums of all runs, of four columns at a time.
template <u32 R, class T>
DEVICE void right(const T *values, const float *residual, const matrix &of, u32 col, u32 first, const float *p, float *parts,
                  float *q) {
    const u32 place = threadIdx.x % STRIP, run = threadIdx.x / STRIP, count = of.rank - first;
    const bool is_there = col < of.cols;
    float totals[R / 4] = {};
    for (u32 base = 0; base < of.rows; base += RUNS * RUN) {
        const u32 start = base + run * RUN, end = is_there ? min(start + RUN, of.rows) : 0;
        float sums[R] = {};
#pragma unroll 4
        for (u32 row = start; row < end; ++row) {
            const u64 at = of.value + (u64)row * of.cols + col;
            const float m = add(wide(values[at]), residual[at]);
#pragma unroll
            for (u32 c = 0; c < R; ++c)
                if (c < count) sums[c] = add(sums[c], mul(m, p[(u64)(first + c) * of.rows + row]));
        }
        const u32 runs = min(RUNS, (of.rows - base + RUN - 1) / RUN);
#pragma unroll
        for (u32 four = 0; four < R / 4; ++four) {
            if (4 * four >= count) continue;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) parts[(4 * run + c) * STRIP + place] = sums[4 * four + c];
            __syncthreads();
            // the first threads are four columns of P by a strip
            if (run < 4)
                for (u32 k = 0; k < runs; ++k) totals[four] = add(totals[four], parts[4 * STRIP * k + threadIdx.x]);
            __syncthreads();
        }
    }
#pragma unroll
    for (u32 four = 0; four < R / 4; ++four)
        if (run < 4 && 4 * four + run < count && is_there) q[(u64)(first + 4 * four + run) * of.cols + col] = totals[four];
}

template <class T>
DEVICE void right_of(const T *values, const float *residual, const matrix *matrices, const tile *tiles, const float *p,
                     float *own) {
    __shared__ float parts[RUNS * 4 * STRIP];
    const tile mine = tiles[blockIdx.x];
    const matrix of = matrices[mine.span];
    const u32 col = (u32)mine.value + threadIdx.x % STRIP;
    p += of.left, own += of.right;
    if (of.rank <= FEW) return right<FEW>(values, residual, of, col, 0, p, parts, own);
    for (u32 first = 0; first < of.rank; first += MANY) right<MANY>(values, residual, of, col, first, p, parts, own);
}

// The values become P * Q^T, and what is left M - P * own^T. A block has 128 rows of 64 columns, a thread four of each.
// Of the factors it has 16 columns at a time.
constexpr u32 HIGH = 128, BROAD = 64, DEEP = 16;

DEVICE void four_of(const float *from, float to[4]) {
    const uint4 raw = *(const uint4 *)from;
    to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z), to[3] = __uint_as_float(raw.w);
}

// Where what is left is not finite it stays as it was.
DEVICE void keep4(float *residual, u32 count, const float m[4], const float own[4]) {
    float rest[4];
    bool all = true;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        rest[j] = sub(m[j], own[j]);
        all = all && is_finite(rest[j]);
    }
    if (all) return store4(residual, count, rest);
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        if (j < count && is_finite(rest[j])) residual[j] = rest[j];
}

template <class T>
DEVICE void finish(T *values, float *residual, const matrix *matrices, const tile *tiles, const float *p, const float *own,
                   const float *q, const u32 *finite, float *factors) {
    __shared__ __align__(16) float of_p[DEEP * HIGH];
    __shared__ __align__(16) float of_own[DEEP * BROAD];
    __shared__ __align__(16) float of_q[DEEP * BROAD];
    const tile mine = tiles[blockIdx.x];
    const matrix of = matrices[mine.span];
    const bool fine = finite[mine.span] != 0;
    const u32 top = (u32)mine.value, side = (u32)mine.record;
    const u32 down = 4 * (threadIdx.x / (BROAD / 4)), across = 4 * (threadIdx.x % (BROAD / 4));
    const u32 rows = left_of(of.rows, top + down), cols = left_of(of.cols, side + across);
    const u64 start = of.value + (u64)(top + down) * of.cols + side + across;
    float m[4][4] = {}, left[4][4] = {}, product[4][4] = {};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float rest[4];
        if (i >= rows) continue;
        load4(values + start + (u64)i * of.cols, cols, m[i]);
        load4(residual + start + (u64)i * of.cols, cols, rest);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) m[i][j] = add(m[i][j], rest[j]);
    }
    for (u32 first = 0; first < of.rank; first += DEEP) {
        const u32 count = min(DEEP, of.rank - first);
#pragma unroll 1
        for (u32 at = threadIdx.x; at < count * HIGH; at += GROUP) {
            const u32 row = top + at % HIGH;
            of_p[at] = row < of.rows ? p[of.left + (u64)(first + at / HIGH) * of.rows + row] : 0.0f;
        }
#pragma unroll 1
        for (u32 at = threadIdx.x; at < count * BROAD; at += GROUP) {
            const u32 col = side + at % BROAD;
            const u64 place = of.right + (u64)(first + at / BROAD) * of.cols + col;
            const bool is_there = col < of.cols;
            of_own[at] = is_there ? own[place] : 0.0f;
            of_q[at] = is_there ? q[place] : 0.0f;
            // Q is where the next round begins: the blocks of the first rows have all of it
            if (top == 0 && fine && is_there) factors[place] = of_q[at];
        }
        __syncthreads();
#pragma unroll 2
        for (u32 c = 0; c < count; ++c) {
            float of_row[4], mine_of[4], all_of[4];
            four_of(of_p + c * HIGH + down, of_row);
            four_of(of_own + c * BROAD + across, mine_of);
            four_of(of_q + c * BROAD + across, all_of);
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    left[i][j] = add(left[i][j], mul(mine_of[j], of_row[i]));
                    product[i][j] = add(product[i][j], mul(all_of[j], of_row[i]));
                }
        }
        // the columns are used again
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (i >= rows) continue;
        if (fine) keep4(residual + start + (u64)i * of.cols, cols, m[i], left[i]);
        store4(values + start + (u64)i * of.cols, cols, product[i]);
    }
}

// Columns made orthonormal: modified Gram-Schmidt, twice over. A warp takes every sixteenth 1024 numbers of a column, and a
// thread always the same ones, so that only sums pass between threads.
template <class F> DEVICE void each(u32 rows, F act) {
    for (u32 start = threadIdx.x / WARP * TILE; start < rows; start += WARPS * TILE) {
        const u32 end = min(start + TILE, rows);
#pragma unroll 4
        for (u32 at = start + lane_of(); at < end; at += WARP) act(at);
    }
}

// A column that is no column.
constexpr u32 NONE = 0xffffffffu;
// Of a column so much must be left that it is not taken for a sum of those before it.
constexpr double DEPENDENT = 1e-5;
constexpr double LARGEST_DOUBLE = 1.7976931348623157e308;

// The columns of P, in memory of either kind.
struct columns {
    float *p;
    u32 rows;
    // of warps, twice: who is fast writes the next ones while others still read
    double *sums;
    u32 turn;

    // Takes a share of another column out of one; then its product with a third, or with itself.
    DEVICE_MEMBER double dot(u32 column, u32 taken, float share, u32 with) {
        float *current = p + (u64)column * rows;
        const float *other = p + (u64)taken * rows, *third = p + (u64)with * rows;
        double total = 0.0;
        for (u32 base = 0; base < rows; base += WARPS * TILE) {
            const u32 start = base + threadIdx.x / WARP * TILE, end = min(start + TILE, rows);
            double sum = 0.0;
#pragma unroll 4
            for (u32 at = start + lane_of(); at < end; at += WARP) {
                float x = current[at];
                if (taken != NONE) current[at] = x = sub(x, mul(share, other[at]));
                sum = add(sum, mul((double)x, with == column ? (double)x : (double)third[at]));
            }
            for (u32 d = WARP / 2; d > 0; d /= 2) sum = add(sum, __shfl_xor_sync(ALL, sum, d));
            turn = WARPS - turn;
            if (lane_of() == 0) sums[turn + threadIdx.x / WARP] = sum;
            __syncthreads();
            const u32 tiles = min(WARPS, (rows - base + TILE - 1) / TILE);
            for (u32 tile = 0; tile < tiles; ++tile) total = add(total, sums[turn + tile]);
        }
        return total;
    }

    // Takes out of a column what those before it have of it, twice; gives the square of what is left.
    DEVICE_MEMBER double sweep(u32 column) {
        u32 taken = NONE;
        float share = 0.0f;
        for (u32 step = 0; step < 2 * column; ++step) {
            const u32 other = step % column;
            share = __double2float_rn(dot(column, taken, share, other));
            taken = other;
        }
        return dot(column, taken, share, column);
    }

    DEVICE_MEMBER void divide(u32 column, double by) {
        float *current = p + (u64)column * rows;
        each(rows, [=](u32 at) { current[at] = __double2float_rn(div((double)current[at], by)); });
    }

    // A unit vector, or zero.
    DEVICE_MEMBER void set(u32 column, u32 unit) {
        float *current = p + (u64)column * rows;
        each(rows, [=](u32 at) { current[at] = at == unit ? 1.0f : 0.0f; });
    }

    // The first unit vector from the column's own number on that those before it do not nearly make up.
    DEVICE_MEMBER void substitute(u32 column) {
        if (column < rows) {
            const double enough = div(mul(0.5, (double)(rows - column)), (double)rows);
            for (u32 step = 0; step < rows; ++step) {
                set(column, (column + step) % rows);
                const double left = sweep(column);
                if (left >= enough) return divide(column, __dsqrt_rn(left));
            }
        }
        set(column, NONE);
    }

    DEVICE_MEMBER void orthonormalise(u32 rank) {
        for (u32 column = 0; column < rank; ++column) {
            const double before = __dsqrt_rn(dot(column, NONE, 0.0f, column));
            const double left = __dsqrt_rn(sweep(column));
            if (left > mul(before, DEPENDENT) || left != left || before > LARGEST_DOUBLE) divide(column, left);
            else substitute(column);
        }
    }
};

#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)

// A Q that is zero begins anew: from there no step would lead anywhere else.
KERNEL offbeat_low_rank_start(const matrix *matrices, const float *starts, float *factors) {
    __shared__ u32 votes[WARPS];
    const matrix of = matrices[blockIdx.x];
    const u64 count = (u64)of.cols * of.rank;
    for (u64 first = 0; first < count; first += GROUP) {
        const u64 at = first + threadIdx.x;
        if (any(at < count && factors[of.right + at] != 0.0f, votes)) return;
    }
    for (u64 at = threadIdx.x; at < count; at += GROUP) factors[of.right + at] = starts[of.right + at];
}
EXPORT(offbeat_low_rank_start)

// P fits into shared memory unless it is long; then it is worked on where it is.
KERNEL offbeat_low_rank_orthonormalise(const matrix *matrices, float *p) {
    constexpr u32 ROOM = 8192;
    __shared__ float room[ROOM];
    __shared__ double sums[2 * WARPS];
    const matrix of = matrices[blockIdx.x];
    const u64 count = (u64)of.rows * of.rank;
    p += of.left;
    if (count > ROOM) return columns{p, of.rows, sums, 0}.orthonormalise(of.rank);
    for (u32 at = threadIdx.x; at < count; at += GROUP) room[at] = p[at];
    __syncthreads();
    columns{room, of.rows, sums, 0}.orthonormalise(of.rank);
    __syncthreads();
    for (u32 at = threadIdx.x; at < count; at += GROUP) p[at] = room[at];
}
EXPORT(offbeat_low_rank_orthonormalise)

// Whether everyone's Q is finite, which all ranks see alike.
KERNEL offbeat_low_rank_check(const matrix *matrices, const float *q, u32 *finite, u32 *odd) {
    __shared__ u32 votes[WARPS];
    const matrix of = matrices[blockIdx.x];
    bool bad = false;
#pragma unroll 4
    for (u64 at = threadIdx.x; at < (u64)of.cols * of.rank; at += GROUP) bad = bad || !is_finite(q[of.right + at]);
    bad = any(bad, votes);
    if (threadIdx.x > 0) return;
    finite[blockIdx.x] = bad ? 0u : 1u;
    if (odd && bad) atomicAdd(odd, 1u);
}
EXPORT(offbeat_low_rank_check)

#define TYPED(T, type) \
    KERNEL offbeat_low_rank_left_##type(const T *values, const float *residual, const matrix *matrices, const tile *tiles, \
                                        const float *factors, float *p) { \
        left_of(values, residual, matrices, tiles, factors, p); \
    } \
    KERNEL offbeat_low_rank_right_##type(const T *values, const float *residual, const matrix *matrices, const tile *tiles, \
                                         const float *p, float *own) { \
        right_of(values, residual, matrices, tiles, p, own); \
    } \
    KERNEL offbeat_low_rank_finish_##type(T *values, float *residual, const matrix *matrices, const tile *tiles, \
                                          const float *p, const float *own, const float *q, const u32 *finite, \
                                          float *factors) { \
        finish(values, residual, matrices, tiles, p, own, q, finite, factors); \
    } \
    EXPORT(offbeat_low_rank_left_##type) \
    EXPORT(offbeat_low_rank_right_##type) \
    EXPORT(offbeat_low_rank_finish_##type)

TYPED(float, f32)
TYPED(f16_t, f16)
TYPED(bf16_t, bf16)
