// The shrink: the chain of one segment of x and up to 64 ranks, and where its sums go.

#pragma once

#include "fetch.cuh"

constexpr int BATCH = 8, BATCHES = SEG / 16 / BATCH;            // steps whose A is loaded at once
constexpr int BUFFERS = WGMMA == 0 ? 1 : WARPGROUPS == 1 ? 3 : 2;  // batches of A in registers

// Waits for a part of x, for the whole warpgroup. Outs are fetched behind the first batches, so that
// the fence, which may wait for all copies of a thread, does not wait for them.
template <int PART>
__device__ __forceinline__ void x_ready(int warpgroup) {
    wait_copies<X_PARTS - 1 - PART + (PART * (BATCHES / X_PARTS) >= BUFFERS)>();
    if (WGMMA) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
}

// Batch b's fragments of A. The registers of warps without ranks stay as they are.
__device__ __forceinline__ void load_a(u32 (&f)[BATCH][4], u32 a, int b, bool has_ranks) {
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
            "@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4]; }"
            : "+r"(f[i][0]), "+r"(f[i][1]), "+r"(f[i][2]), "+r"(f[i][3])
            : "r"(a + (b * BATCH + i) * 32), "r"((u32)has_ranks)
            : "memory");
}

template <int B>
__device__ __forceinline__ void batch_wgmma(float (&acc)[HALVES][4], u32 (&f)[BUFFERS][BATCH][4], u32 a,
                                            u64 rows, bool has_ranks, int length, int warpgroup) {
    if (K_IN % SEG && B * BATCH * 16 >= length) return;
    if (B >= BUFFERS) {  // that many batches ago is done: its registers
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BUFFERS - 1) : "memory");
        load_a(f[B % BUFFERS], a, B, has_ranks);
    }
    if (B % (BATCHES / X_PARTS) == 0) x_ready<B / (BATCHES / X_PARTS)>(warpgroup);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int step = B * BATCH + i;
        wgmma(acc, f[B % BUFFERS][i], rows + (step / 4 * X_BLOCK + step % 4 * 32) / 16);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The chain of one segment, by the tensor cores of a warpgroup: 14 cycles a step. fetch_outs() is for
// the time in which they are busy.
template <typename F>
__device__ __forceinline__ void chain_wgmma(float (&acc)[HALVES][4], u32 a, u32 x, bool has_ranks, int length,
                                            int warpgroup, F fetch_outs) {
    // Rows are 128 bytes apart, groups of 8 rows 1024; the swizzle of 128 bytes.
    const u64 rows = (u64)((x & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
    u32 f[BUFFERS][BATCH][4];
#pragma unroll
    for (int b = 0; b < BUFFERS; b++) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) f[b][i][0] = f[b][i][1] = f[b][i][2] = f[b][i][3] = 0;
        load_a(f[b], a, b, has_ranks);
    }
    batch_wgmma<0>(acc, f, a, rows, has_ranks, length, warpgroup);
    batch_wgmma<1>(acc, f, a, rows, has_ranks, length, warpgroup);
    if (BUFFERS == 2) fetch_outs();
    batch_wgmma<2>(acc, f, a, rows, has_ranks, length, warpgroup);
    if (BUFFERS == 3) fetch_outs();
    batch_wgmma<3>(acc, f, a, rows, has_ranks, length, warpgroup);
    batch_wgmma<4>(acc, f, a, rows, has_ranks, length, warpgroup);
    batch_wgmma<5>(acc, f, a, rows, has_ranks, length, warpgroup);
    batch_wgmma<6>(acc, f, a, rows, has_ranks, length, warpgroup);
    batch_wgmma<7>(acc, f, a, rows, has_ranks, length, warpgroup);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        asm volatile("" : "+f"(acc[h][0]), "+f"(acc[h][1]), "+f"(acc[h][2]), "+f"(acc[h][3])::"memory");
}

template <int Q>
__device__ __forceinline__ void quarter_mma(float (&acc)[HALVES][4], u32 a, u32 x, u32 of_lane, bool has_ranks,
                                            int length, int warpgroup) {
    if (K_IN % SEG && Q * 256 >= length) return;
    if (Q > 0 && Q % (4 / X_PARTS) == 0) x_ready<Q / (4 / X_PARTS)>(warpgroup);
    if (!has_ranks) return;
    const int pairs = K_IN % SEG ? min(8, (length - Q * 256) / 32) : 8;
    u32 w[2][2][4], f[2][HALVES][4];
    // Two steps: two fragments of A, and per 8 rows one load of both steps of x.
    auto load = [&](int i) {
        ldmatrix(w[i & 1][0], a + Q * 512 + i * 64);
        ldmatrix(w[i & 1][1], a + Q * 512 + i * 64 + 32);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            ldmatrix(f[i & 1][h], x + (Q * 4 + i / 2) * X_BLOCK + h * 1024 + (of_lane ^ ((i & 1) << 6)));
    };
    load(0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (K_IN % SEG && i >= pairs) break;
        if (i < 7) load(i + 1);
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                mma(acc[h], w[i & 1][s], f[i & 1][h][s * 2], f[i & 1][h][s * 2 + 1]);
    }
}

// The same chain by each warp for itself: 25 cycles a step.
template <typename F>
__device__ __forceinline__ void chain_mma(float (&acc)[HALVES][4], u32 a, u32 x, bool has_ranks, int length,
                                          int warpgroup, int lane, F fetch_outs) {
    const u32 of_lane = (lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);  // row, part of 64 bytes
    x_ready<0>(warpgroup);
    fetch_outs();
    quarter_mma<0>(acc, a, x, of_lane, has_ranks, length, warpgroup);
    quarter_mma<1>(acc, a, x, of_lane, has_ranks, length, warpgroup);
    quarter_mma<2>(acc, a, x, of_lane, has_ranks, length, warpgroup);
    quarter_mma<3>(acc, a, x, of_lane, has_ranks, length, warpgroup);
}

// A warp's segment sums to all CTAs: per lane two rows of two ranks, rows that exist only.
__device__ __forceinline__ void send(const float (&acc)[HALVES][4], u32 to, u32 bar, int num_rows, int t) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        if (h * 8 + t * 2 >= num_rows) continue;
#pragma unroll
        for (int p = 0; p < CLUSTER; p++)
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                    of_peer(to + h * 512, p)),
                "f"(acc[h][0]), "f"(acc[h][1]), "f"(acc[h][2]), "f"(acc[h][3]), "r"(of_peer(bar, p))
                : "memory");
    }
}

// The unit of this warpgroup, whose A has arrived and whose x is on its way.
template <typename F>
__device__ __forceinline__ void shrink(const Place& me, const Unit& unit, int num_rows, F fetch_outs) {
    float acc[HALVES][4] = {};
    const u32 a = unit.a + (me.lane & 15) * PITCH + (me.lane >> 4) * 16;
#if WGMMA
    chain_wgmma(acc, a, unit.x, unit.has_ranks, unit.length, me.warpgroup, fetch_outs);
#else
    chain_mma(acc, a, unit.x, unit.has_ranks, unit.length, me.warpgroup, me.lane, fetch_outs);
#endif
    if (!unit.has_ranks) return;
    const u32 to = me.base + AT_SUMS + (unit.seg * BLOCKS + unit.block) * HALVES * 512 + me.lane * 16;
    send(acc, to, me.sums_bar, num_rows, me.t);
}
