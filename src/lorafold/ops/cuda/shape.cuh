// Sizes of the cluster kernel: what `cluster_choice.py` defines, and what follows from it.

#pragma once

#include "ptx.cuh"

constexpr int N_OUT[] = {N_OUTS};
constexpr int SLICES = sizeof(N_OUT) / sizeof(int);
// Columns of each slice, and its first chunk: 64 columns, for a warp. Names, as an array that code
// on the device indexes would stand in memory.
constexpr int N0 = N_OUT[0], N1 = SLICES > 1 ? N_OUT[1 % SLICES] : 0, N2 = SLICES > 2 ? N_OUT[2 % SLICES] : 0;
constexpr int CHUNK1 = (N0 + 63) / 64, CHUNK2 = CHUNK1 + (N1 + 63) / 64, CHUNKS = CHUNK2 + (N2 + 63) / 64;
static_assert(SLICES <= 3, "slices");

constexpr int THREADS = WARPGROUPS * 128, WARPS = WARPGROUPS * 4;
constexpr int SEG = 1024, SEGS = (K_IN + SEG - 1) / SEG;
constexpr int HALVES = TILE / 8;                    // groups of 8 rows
constexpr int STEPS = (MAX_RANK + 15) / 16;         // of the expand: blocks of 16 ranks per slice
constexpr int BLOCKS = SLICES * STEPS;
constexpr int UNIT_BLOCKS = UNIT_RANKS / 16;
constexpr int PARTS = (BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;  // units per segment
constexpr int UNITS = SEGS * PARTS, OWN_UNITS = (UNITS + CLUSTER - 1) / CLUSTER;
constexpr int SHARES = CLUSTER * GROUPS;
constexpr int OWN_CHUNKS = (CHUNKS + SHARES - 1) / SHARES;  // of a CTA, at most
constexpr int COLUMN = MAX_RANK * 2, PIECE = 8 * COLUMN + 16, CHUNK = 8 * PIECE;  // bytes of B
constexpr int PITCH = SEG * 2 + 16;                 // bytes of a row of A; no bank conflicts
constexpr int X_BLOCK = TILE * 128;                 // bytes of x: 64 elements of all rows
// Shared memory, in bytes from its start.
constexpr int X_BYTES = 16 * X_BLOCK, A_BYTES = UNIT_RANKS * PITCH;
constexpr int AT_A = OWN_UNITS * X_BYTES;                            // x first: aligned to 1024
constexpr int AT_B = AT_A + OWN_UNITS * A_BYTES;
constexpr int AT_OUT = AT_B + OWN_CHUNKS * CHUNK;                    // [chunk][half][2][lane] 16 B
constexpr int AT_SUMS = AT_OUT + OWN_CHUNKS * HALVES * 1024;         // [segment][block][half][lane]
constexpr int AT_XA = AT_SUMS + SEGS * BLOCKS * HALVES * 512;        // [block][half][lane] 8 B
constexpr int AT_BARS = AT_XA + BLOCKS * HALVES * 256;               // per warp: A, B; then sums
static_assert(AT_BARS + (2 * WARPS + 1) * 8 == SHARED_BYTES, "cluster_choice.py computes it likewise");
static_assert(OWN_UNITS <= WARPGROUPS && K_IN % 128 == 0 && MAX_RANK % 8 == 0, "shape");

struct Slice {
    const i64 *a, *b;
    const float* scale;
    const int* rank;
    u16* out;
    i64 stride;
};

struct Params {
    const u16* x;
    const int *tile_key, *tile_rows;
    const int* source;  // of each row, its row of x; none: row / top_k
    i64 x_stride, top_k;
    Slice slice[SLICES];
};

__device__ __forceinline__ int slice_of_chunk(int chunk) {
    return (SLICES > 1 && chunk >= CHUNK1) + (SLICES > 2 && chunk >= CHUNK2);
}
__device__ __forceinline__ int first_chunk_of(int slice) { return slice == 0 ? 0 : slice == 1 ? CHUNK1 : CHUNK2; }
__device__ __forceinline__ int n_out_of(int slice) { return slice == 0 ? N0 : slice == 1 ? N1 : N2; }
__device__ __forceinline__ int column_of_chunk(int chunk, int slice) { return (chunk - first_chunk_of(slice)) * 64; }
