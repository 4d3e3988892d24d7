// Who does what: the thread's place, its tile, and what of it is its own.

#pragma once

#include "shape.cuh"

struct Adapter {  // of one slice; address b is 0 where there is none
    i64 a, b;
    float scale;
    int rank;
};

struct Place {
    int lane, g, t;  // g, t: row and pair of columns of an mma's result
    int warp, warpgroup, cta, tile;
    u32 base, a_bar, b_bar, sums_bar;  // addresses in shared memory
};

struct Tile {
    int key;
    int my_row;    // of lanes below TILE, -1 where there is none
    int num_rows;  // they stand at the front
};

// The unit of a warpgroup, and in it this warp's block of ranks; where x and A of it go.
struct Unit {
    int seg, block, length;
    bool exists, has_ranks;
    u32 x, a;
};

struct Share {  // the chunks of this CTA; its warps take them in turn
    int first, num;
};

// adapter[index], from registers.
__device__ __forceinline__ Adapter pick(const Adapter (&adapter)[SLICES], int index) {
    Adapter v = adapter[0];
#pragma unroll
    for (int s = 1; s < SLICES; s++)
        if (index == s) v = adapter[s];
    return v;
}

__device__ __forceinline__ int rank_of(const Adapter (&adapter)[SLICES], int index) {
    return pick(adapter, index).rank;
}

__device__ __forceinline__ Place place_of(const unsigned char* memory) {
    Place me;
    me.lane = threadIdx.x & 31, me.g = me.lane >> 2, me.t = me.lane & 3;
    // Through a shuffle: the same in all lanes, and not computed again where time is short.
    me.warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), me.cta = __shfl_sync(~0u, blockIdx.x % CLUSTER, 0);
    me.warpgroup = WARPGROUPS == 1 ? 0 : me.warp >> 2;
    me.tile = blockIdx.x / CLUSTER;
    me.base = (u32)__cvta_generic_to_shared(memory);
    me.a_bar = me.base + AT_BARS + me.warp * 8, me.b_bar = me.a_bar + WARPS * 8;
    me.sums_bar = me.base + AT_BARS + WARPS * 16;
    return me;
}

__device__ __forceinline__ Tile tile_of(const Params& p, const Place& me) {
    Tile tile;
    tile.key = p.tile_key[me.tile];
    tile.my_row = me.lane < TILE ? p.tile_rows[me.tile * TILE + me.lane] : -1;
    tile.num_rows = __popc(__ballot_sync(~0u, tile.my_row >= 0));
    return tile;
}

// A key's entries of all tables; whether any slice has an adapter.
__device__ __forceinline__ bool look_up(Adapter (&adapter)[SLICES], const Params& p, int key) {
    bool any = false;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        Adapter& of = adapter[s];
        of.a = key < 0 ? 0 : p.slice[s].a[key];
        of.b = key < 0 ? 0 : p.slice[s].b[key];
        of.rank = key < 0 ? 0 : p.slice[s].rank[key];
        of.scale = key < 0 ? 0 : p.slice[s].scale[key];
        if (of.a == 0 || of.b == 0) of.b = of.rank = 0;
        any |= of.b != 0;
    }
    return any;
}

__device__ __forceinline__ Unit unit_of(const Place& me, const Adapter (&adapter)[SLICES]) {
    const int unit = me.warpgroup * CLUSTER + me.cta, first_block = unit % PARTS * UNIT_BLOCKS;
    Unit mine;
    mine.seg = unit / PARTS, mine.block = first_block + (me.warp & 3);
    mine.length = min(SEG, K_IN - mine.seg * SEG);
    mine.exists = mine.has_ranks = false;
    if (unit < UNITS) {
#pragma unroll
        for (int i = 0; i < UNIT_BLOCKS; i++) {
            const int b = first_block + i;
            const bool exists = b < BLOCKS && b % STEPS * 16 < rank_of(adapter, b / STEPS);
            mine.exists |= exists;
            mine.has_ranks |= exists && b == mine.block;
        }
    }
    mine.x = me.base + me.warpgroup * X_BYTES;
    mine.a = me.base + AT_A + me.warpgroup * A_BYTES + (me.warp & 3) * 16 * PITCH;
    return mine;
}

__device__ __forceinline__ Share share_of(const Place& me) {
    const int share = blockIdx.y * CLUSTER + me.cta, first = share * CHUNKS / SHARES;
    return {first, (share + 1) * CHUNKS / SHARES - first};
}

// The CTA's barriers, and the first half of a barrier of the cluster: peers may send when all have
// made theirs.
__device__ __forceinline__ void make_bars(const Place& me, const Adapter (&adapter)[SLICES], int num_rows) {
    if (threadIdx.x == 0) {
        int num_blocks = 0;
#pragma unroll
        for (int s = 0; s < SLICES; s++) num_blocks += (adapter[s].rank + 15) / 16;
        bar_init(me.sums_bar);
        bars_made();
        bar_expect(me.sums_bar, SEGS * num_blocks * ((num_rows + 1) / 2) * 128);
    }
    __syncwarp();
    // Relaxed: what peers need is ordered by the fence; a release would wait for all memory.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (me.lane == 0) {
        bar_init(me.a_bar);
        bar_init(me.b_bar);
        bars_made();
    }
    __syncwarp();
}
