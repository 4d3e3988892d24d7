// The expand: segment sums to xa, xa times the CTA's columns of B, and the fold.

#pragma once

#include "work.cuh"

// Two outputs: the deltas to bf16, scaled and added in fp32, each rounded on its own.
__device__ __forceinline__ u32 fold(u32 out, float d0, float d1, float scale) {
    const u32 d = pack(d0, d1);
    return pack(__fadd_rn(low_of(out), __fmul_rn(scale, low_of(d))),
                __fadd_rn(high_of(out), __fmul_rn(scale, high_of(d))));
}

// Segment sums of two neighbouring ranks of two rows, added in order, rounded once; +0 beyond the
// rank. Written as the N operand: lane (g, t) has ranks 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of row g.
__device__ __forceinline__ void add_segments(const unsigned char* sums, unsigned char* xa, int left, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float c0 = 0.0f, c1 = 0.0f, c2 = 0.0f, c3 = 0.0f;
#pragma unroll
    for (int s = 0; s < SEGS; s++) {
        const float4 v = *(const float4*)(sums + s * (BLOCKS * HALVES * 512) + lane * 16);
        c0 = __fadd_rn(c0, v.x), c1 = __fadd_rn(c1, v.y);
        c2 = __fadd_rn(c2, v.z), c3 = __fadd_rn(c3, v.w);
    }
    if (g * 2 >= left) c0 = c1 = 0.0f;
    if (g * 2 + 1 >= left) c2 = c3 = 0.0f;
    unsigned char* at = xa + (t * 8 + (g & 3)) * 8 + (g >> 2) * 4;
    *(u32*)at = pack(c0, c2);
    *(u32*)(at + 32) = pack(c1, c3);
}

// xa of all ranks and rows, dealt over the warps.
__device__ __forceinline__ void add_all_segments(unsigned char* memory, const Place& me,
                                                 const Adapter (&adapter)[SLICES]) {
#pragma unroll 1
    for (int i = me.warp; i < BLOCKS * HALVES; i += WARPS) {
        const int b = i / HALVES, left = rank_of(adapter, b / STEPS) - b % STEPS * 16;
        if (left > 0) add_segments(memory + AT_SUMS + i * 512, memory + AT_XA + i * 256, left, me.lane);
    }
}

// A chunk's fragments of B; what is beyond the rank becomes +0. Row g of an mma is column 8 g + 2 j,
// row g + 8 the one after: a lane's outputs are then 8 columns in order.
__device__ __forceinline__ void load_b(u32 (&w)[STEPS][4][4], const Place& me, int i, int rank) {
    const int lane = me.lane;
    const u32 at = me.base + AT_B + i * CHUNK + (lane & 7) * PIECE + ((lane >> 3) & 1) * COLUMN + (lane >> 4) * 16;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int left = rank - s * 16 - (lane & 3) * 2;
        if (left + (lane & 3) * 2 <= 0) break;
#pragma unroll
        for (int j = 0; j < 4; j++) ldmatrix(w[s][j], at + j * 2 * COLUMN + s * 32);
        if (left + (lane & 3) * 2 < 16) {
            const u32 low = left > 1 ? ~0u : left == 1 ? 0xffffu : 0u;
            const u32 high = left > 9 ? ~0u : left == 9 ? 0xffffu : 0u;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                w[s][j][0] &= low, w[s][j][1] &= low;
                w[s][j][2] &= high, w[s][j][3] &= high;
            }
        }
    }
}

// A chunk's 64 columns of all rows.
__device__ __forceinline__ void multiply(float (&d)[HALVES][4][4], const u32 (&w)[STEPS][4][4],
                                         const unsigned char* memory, int slice, int rank, int lane) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s * 16 >= rank) break;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int at = ((slice * STEPS + s) * HALVES + h) * 32 + lane;
            const uint2 xa = *(const uint2*)(memory + AT_XA + at * 8);
#pragma unroll
            for (int j = 0; j < 4; j++) mma(d[h][j], w[s][j], xa.x, xa.y);
        }
    }
}

// Fold the lane's 8 columns of each of its rows.
__device__ __forceinline__ void fold_columns(u16* out, i64 stride, const float (&d)[HALVES][4][4], float scale,
                                      const unsigned char* memory, int i, const int (&rows)[HALVES][2],
                                      int num_rows, const Place& me) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (h * 8 + me.t * 2 + e >= num_rows) continue;
            uint4 v;
            const uint4 o = *(const uint4*)(memory + AT_OUT + ((i * HALVES + h) * 2 + e) * 512 + me.lane * 16);
            v.x = fold(o.x, d[h][0][e], d[h][0][e + 2], scale);
            v.y = fold(o.y, d[h][1][e], d[h][1][e + 2], scale);
            v.z = fold(o.z, d[h][2][e], d[h][2][e + 2], scale);
            v.w = fold(o.w, d[h][3][e], d[h][3][e + 2], scale);
            *(uint4*)(out + rows[h][e] * stride) = v;
        }
}
