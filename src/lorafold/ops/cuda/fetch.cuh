// What comes to shared memory: A and B by the copy engine, x and outs by threads.

#pragma once

#include "work.cuh"

// 16 ranks of A to shared memory, of one segment. Place m has rank 2 m, place 8 + m rank 2 m + 1, so
// that a lane of the result has two ranks that are neighbours.
__device__ __forceinline__ void fetch_a(u32 to, u32 bar, const Adapter& of, int step, int seg, int lane) {
    const int length = min(SEG, K_IN - seg * SEG), left = of.rank - step * 16;
    if (lane == 0) bar_expect(bar, min(16, left) * length * 2);
    __syncwarp();
    const int r = (lane & 7) * 2 + (lane >> 3);
    if (lane < 16 && r < left)
        bulk_copy(to + lane * PITCH, of.a + ((i64)(step * 16 + r) * K_IN + seg * SEG) * 2, length * 2, bar);
}

// 64 columns of B: 8 columns to a piece, a gap after each. Whole rows of max_rank, or, where the rank
// is at most half of it, only what there is.
__device__ __forceinline__ void fetch_b(u32 to, u32 bar, const Adapter& of, int col, int n, int lane) {
    const int num = min(64, n - col);
    const u32 bytes = (of.rank + 7) / 8 * 16;
    const bool whole = bytes * 2 > COLUMN;
    if (lane == 0)
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar),
                     "r"(num * (whole ? COLUMN : bytes))
                     : "memory");
    __syncwarp();
    const i64 from = of.b + (i64)col * COLUMN;
    if (whole) {
        if (lane * 8 < num) bulk_copy(to + lane * PIECE, from + lane * 8 * COLUMN, 8 * COLUMN, bar);
    } else if (bytes) {
        for (int i = lane; i < num; i += 32)
            bulk_copy(to + (i >> 3) * PIECE + (i & 7) * COLUMN, from + i * COLUMN, bytes, bar);
    }
}

// The rows of x that a warp fetches, from the lane's 16 bytes of the segment on; my_x is the lane's.
__device__ __forceinline__ void x_rows(const u16* (&from)[TILE / 4], const Params& p, int my_x, int seg, int warp,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) {
        const i64 row = __shfl_sync(~0u, my_x, warp + i * 4);
        from[i] = p.x + row * p.x_stride + seg * SEG + lane * 8;
    }
}

// The segment's x, rows dealt over the warps of a warpgroup. 64 elements of a row are 128 bytes, whose
// 16-byte parts are permuted as a 128-byte swizzle does.
__device__ __forceinline__ void fetch_x(u32 to, const u16* const (&from)[TILE / 4], int num_rows, int length,
                                        int warp, int lane) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            const int r = warp + i * 4;
            if (r < num_rows && (K_IN % SEG == 0 || q * 256 + lane * 8 < length))
                copy16(to + (q * 4 + (lane >> 3)) * X_BLOCK + r * 128 + (((lane ^ r) & 7) << 4), from[i] + q * 256);
        }
        if (q % (4 / X_PARTS) == 4 / X_PARTS - 1) commit();
    }
}

// All chunks of B that are this warp's.
__device__ __forceinline__ void fetch_chunks(const Place& me, const Share& share, const Adapter (&adapter)[SLICES]) {
#pragma unroll 1
    for (int i = me.warp; i < share.num; i += WARPS) {
        const int slice = slice_of_chunk(share.first + i);
        const Adapter of = pick(adapter, slice);
        if (of.b)
            fetch_b(me.base + AT_B + i * CHUNK, me.b_bar, of, column_of_chunk(share.first + i, slice),
                    n_out_of(slice), me.lane);
    }
    if (me.lane == 0) bar_expect(me.b_bar, 0);
    __syncwarp();
}

// A row's outputs of this CTA, on their way to the L2.
__device__ __forceinline__ void prefetch_outs(const Params& p, const Share& share, const Adapter (&adapter)[SLICES],
                                              int row) {
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        const int from = max(0, share.first - first_chunk_of(s)) * 64;
        const int to = min(n_out_of(s), (share.first + share.num - first_chunk_of(s)) * 64);
        if (adapter[s].b && from < to) prefetch(p.slice[s].out + row * p.slice[s].stride + from, (to - from) * 2);
    }
}

// A lane copies the outputs that it folds itself: 8 columns of each of its rows.
__device__ __forceinline__ void fetch_outs(const Params& p, const Place& me, const Share& share,
                                           const Adapter (&adapter)[SLICES], const int (&rows)[HALVES][2],
                                           int num_rows) {
#pragma unroll 1
    for (int i = me.warp; i < share.num; i += WARPS) {
        const int slice = slice_of_chunk(share.first + i);
        const int col = column_of_chunk(share.first + i, slice) + me.g * 8;
        if (col >= n_out_of(slice) || pick(adapter, slice).b == 0) continue;
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (h * 8 + me.t * 2 + e < num_rows)
                    copy16(me.base + AT_OUT + ((i * HALVES + h) * 2 + e) * 512 + me.lane * 16,
                           p.slice[slice].out + rows[h][e] * p.slice[slice].stride + col);
    }
    commit();
}
