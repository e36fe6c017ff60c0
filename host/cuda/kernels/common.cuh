// Types, conversions, warp and tensor-core primitives. Nothing of the toolkit is included: NVRTC alone compiles all of this.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV static __device__ __forceinline__

constexpr int WARP = 32;
constexpr u32 FULL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;

DEV float minus_infinity() { return __int_as_float(0xff800000); }

// ---- f16 -------------------------------------------------------------------------------------------------------------

DEV float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEV u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// Two halves in a word, the first in the low bits.
DEV u32 pack_halves(float low, float high) {
    return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
}

DEV u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEV u32 sub2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEV u32 fma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The low, or the high half of a word in both halves.
DEV u32 both_low(u32 a) { return __byte_perm(a, a, 0x1010); }
DEV u32 both_high(u32 a) { return __byte_perm(a, a, 0x3232); }

// ---- warps -----------------------------------------------------------------------------------------------------------

DEV float warp_sum(float v) {
#pragma unroll
    for (int m = WARP / 2; m > 0; m /= 2) v += __shfl_xor_sync(FULL, v, m);
    return v;
}

DEV float warp_max(float v) {
#pragma unroll
    for (int m = WARP / 2; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, m));
    return v;
}

// Sum, or maximum, over a block; every thread gets it. `shared` holds a float a warp.
DEV float block_sum(float v, float *shared) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    float total = 0;
    for (u32 w = 0; w < blockDim.x / WARP; w++) total += shared[w];
    return total;
}

DEV float block_max(float v, float *shared) {
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    float most = shared[0];
    for (u32 w = 1; w < blockDim.x / WARP; w++) most = fmaxf(most, shared[w]);
    return most;
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------

// c += a b on f16 operands: a is 16x16, b 16x8. Of lane l = 4g + t: a[0], a[1] are rows g, g + 8 at k = 2t, 2t + 1; a[2], a[3]
// the same rows at k + 8; b[0], b[1] column g at k = 2t and 2t + 8; c[0..2] row g, c[2..4] row g + 8 at columns 2t, 2t + 1.
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices of halves; lane l names row l % 8 of matrix l / 8.
DEV void load_matrices(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

DEV void load_matrices_transposed(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
