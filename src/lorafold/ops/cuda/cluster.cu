// Shrink, exchange and expand of one call in one launch: one cluster of CTAs per tile of the plan,
// and per part ("group") of the columns.
//
// Compile-time: CLUSTER, GROUPS, WARPGROUPS, MIN_CTAS, TILE (rows: 8 or 16), K_IN, N_OUTS (of each
// slice), MAX_RANK, UNIT_RANKS, WGMMA (or mma.sync), X_PARTS (in which x is waited for: 1, 2 or 4),
// SHARED_BYTES (as cluster_choice.py computed them).
//
// All slices' ranks stand in one row of blocks of 16. A unit is a segment of 1024 times UNIT_RANKS
// ranks (up to 64): one warpgroup walks it, 16 ranks per warp, ranks the M operand and rows the N.
// The fp32 segment sums go to every CTA of the cluster, which adds them in ascending order, rounds,
// and multiplies them with its columns of B. A and B are on their way to shared memory before the
// wait for the kernel before.
//
// What does not exist (ranks, rows, the end of B's columns) is not loaded; what the tensor cores
// make of the bytes that stand there stays in rows or columns of the result that nobody reads.

#include "expand.cuh"
#include "shrink.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) lora_cluster(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    let_next_start();
    const Place me = place_of(memory);
    const Tile tile = tile_of(p, me);
    Adapter adapter[SLICES];
    const bool any = look_up(adapter, p, tile.key);
    if (tile.num_rows == 0 || !any) {
        wait_for_predecessor();
        return;  // all of the cluster alike
    }

    // Before the wait: the plan, the tables and weights. x and outs may still be written: of them
    // only what is a hint, to the L2, which all kernels share.
    const Unit unit = unit_of(me, adapter);
    const Share share = share_of(me);
    make_bars(me, adapter, tile.num_rows);
    const int my_x = tile.my_row / (int)p.top_k;
    if (unit.exists && (me.warp & 3) == 3 && tile.my_row >= 0 && !p.source)
        prefetch(p.x + my_x * p.x_stride + unit.seg * SEG, unit.length * 2);
    if (unit.has_ranks)
        fetch_a(unit.a, me.a_bar, pick(adapter, unit.block / STEPS), unit.block % STEPS, unit.seg, me.lane);
    fetch_chunks(me, share, adapter);
    if (me.warp == WARPS - 1 && tile.my_row >= 0) prefetch_outs(p, share, adapter, tile.my_row);
    int rows[HALVES][2];  // that the lane folds
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) rows[h][e] = __shfl_sync(~0u, tile.my_row, h * 8 + me.t * 2 + e);
    const u16* x_from[TILE / 4];
    x_rows(x_from, p, my_x, unit.seg, me.warp & 3, me.lane);
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) asm volatile("" : "+l"(x_from[i]));  // now, not after the wait
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    wait_for_predecessor();
    if (p.source)  // may have been written by the kernel before
        x_rows(x_from, p, tile.my_row < 0 ? 0 : p.source[tile.my_row], unit.seg, me.warp & 3, me.lane);

    auto outs = [&]() { fetch_outs(p, me, share, adapter, rows, tile.num_rows); };
    if (unit.exists) {
        fetch_x(unit.x, x_from, tile.num_rows, unit.length, me.warp & 3, me.lane);
        if (unit.has_ranks) bar_wait<false>(me.a_bar);
        shrink(me, unit, tile.num_rows, outs);
    } else {
        outs();
    }

    u32 w[STEPS][4][4];
    if (me.warp < share.num) {
        bar_wait<false>(me.b_bar);
        load_b(w, me, me.warp, rank_of(adapter, slice_of_chunk(share.first + me.warp)));
    }
    wait_copies<0>();
    bar_wait<true>(me.sums_bar);
    add_all_segments(memory, me, adapter);
    __syncthreads();
#pragma unroll 1
    for (int i = me.warp; i < share.num; i += WARPS) {
        const int slice = slice_of_chunk(share.first + i);
        const Adapter of = pick(adapter, slice);
        float d[HALVES][4][4] = {};
        if (of.b) multiply(d, w, memory, slice, of.rank, me.lane);
        if (i + WARPS < share.num)  // the next one's, while this one is folded
            load_b(w, me, i + WARPS, rank_of(adapter, slice_of_chunk(share.first + i + WARPS)));
        const int col = column_of_chunk(share.first + i, slice) + me.g * 8;
        if (col < n_out_of(slice) && of.b)
            fold_columns(p.slice[slice].out + col, p.slice[slice].stride, d, of.scale, memory, i, rows, tile.num_rows, me);
    }
}
