// The scalar codecs on a CUDA device, in the host's codec concept (`opencoti.codec.device-source/1`, language `cuda-c++/1`).
// Layouts and encodings are those of formats.rs; see lib.rs for the planes of a tile.

namespace opencoti_kv_scalar {

constexpr int SLOTS = 128;

// Bytes `at` of plane `PLANE` (bytes a block before it), N a block, of a tile of D values a row.
template <int D, int PLANE, int N> DEV const u8 *field(const u8 *tile, int slot, int block) {
    return tile + SLOTS * (D / 32) * PLANE + (slot * (D / 32) + block) * N;
}
template <int D, int PLANE, int N> DEV u8 *field(u8 *tile, int slot, int block) {
    return tile + SLOTS * (D / 32) * PLANE + (slot * (D / 32) + block) * N;
}

DEV u16 half_field(const u8 *p) { return *(const u16 *)p; }
DEV u32 twice(u16 h) { return h | (u32)h << 16; }

// Four codes, a byte each, as two pairs of f16 less `less` (1024 and what the codes are above their values).
DEV void pairs(u32 codes, u32 less, u32 &first, u32 &second) {
    first = sub2(__byte_perm(codes, 0x64646464, 0x4140), less);
    second = sub2(__byte_perm(codes, 0x64646464, 0x4342), less);
}

DEV float inverse(float d) { return d == 0.f ? 0.f : __fdiv_rn(1.f, d); }

// The signed value of largest magnitude among the lanes', the first on a tie.
DEV float extreme(float v) {
    float most = warp_max(fabsf(v));
    if (!(most > 0.f)) return 0.f;
    return __shfl_sync(FULL, v, __ffs(__ballot_sync(FULL, fabsf(v) == most)) - 1);
}

// trunc(v * by + offset) within 0 ..= limit.
DEV u32 code(float v, float by, float offset, u32 limit) {
    float scaled = __fadd_rn(__fmul_rn(v, by), offset);
    return scaled > 0.f ? min((u32)scaled, limit) : 0;
}

// Bytes of low nibbles: that of lane j holds the codes of lanes j and j + 16.
DEV void put_nibbles(u8 *to, u32 q, int lane) {
    u32 other = __shfl_sync(FULL, q, lane | 16);
    if (lane < 16) to[lane] = (u8)((q & 15) | (other & 15) << 4);
}

struct F16 {
    static constexpr int CHUNK = 8;
    struct Raw { uint4 v; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int chunk) { return {*(const uint4 *)(tile + (slot * D + chunk * 8) * 2)}; }
    DEV void decode(const Raw &r, u32 (&out)[4]) { out[0] = r.v.x, out[1] = r.v.y, out[2] = r.v.z, out[3] = r.v.w; }
    template <int D> DEV void encode(u8 *tile, int slot, int block, float v, int lane) {
        ((u16 *)tile)[slot * D + block * 32 + lane] = float_to_half(v);
    }
};

struct Bf16 {
    static constexpr int CHUNK = 8;
    struct Raw { uint4 v; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int chunk) { return {*(const uint4 *)(tile + (slot * D + chunk * 8) * 2)}; }
    DEV u32 halves(u32 pair) {
        float low = __int_as_float((int)(pair << 16)), high = __int_as_float((int)(pair & 0xffff0000));
        return pack_halves(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
    }
    DEV void decode(const Raw &r, u32 (&out)[4]) {
        out[0] = halves(r.v.x), out[1] = halves(r.v.y), out[2] = halves(r.v.z), out[3] = halves(r.v.w);
    }
    template <int D> DEV void encode(u8 *tile, int slot, int block, float v, int lane) {
        u32 bits = (u32)__float_as_int(v);
        u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ((u16 *)tile)[slot * D + block * 32 + lane] = (u16)(v != v ? bits >> 16 | 0x40 : rounded);
    }
};

struct Q8_0 {
    static constexpr int CHUNK = 32;
    struct Raw { uint4 low, high; u16 d; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int b) {
        const uint4 *codes = (const uint4 *)field<D, 0, 32>(tile, slot, b);
        return {codes[0], codes[1], half_field(field<D, 32, 2>(tile, slot, b))};
    }
    DEV void decode(const Raw &r, u32 (&out)[16]) {
        u32 words[8] = {r.low.x, r.low.y, r.low.z, r.low.w, r.high.x, r.high.y, r.high.z, r.high.w}, d = twice(r.d);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            u32 a, b;
            pairs(words[w] ^ 0x80808080, 0x64806480, a, b);
            out[2 * w] = mul2(a, d), out[2 * w + 1] = mul2(b, d);
        }
    }
    template <int D> DEV void encode(u8 *tile, int slot, int b, float v, int lane) {
        float d = __fdiv_rn(fabsf(extreme(v)), 127.f);
        field<D, 0, 32>(tile, slot, b)[lane] = (u8)(int)fminf(fmaxf(roundf(__fmul_rn(v, inverse(d))), -128.f), 127.f);
        if (lane == 0) *(u16 *)field<D, 32, 2>(tile, slot, b) = float_to_half(d);
    }
};

struct Q6_0 {
    static constexpr int CHUNK = 32;
    struct Raw { uint4 codes; uint2 high; u16 d; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int b) {
        return {*(const uint4 *)field<D, 0, 16>(tile, slot, b), *(const uint2 *)field<D, 16, 8>(tile, slot, b),
                half_field(field<D, 24, 2>(tile, slot, b))};
    }
    DEV void decode(const Raw &r, u32 (&out)[16]) {
        u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w}, d = twice(r.d);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            u32 low = w < 4 ? words[w] & 0x0f0f0f0f : words[w - 4] >> 4 & 0x0f0f0f0f;
            u32 high = (w % 2 ? r.high.y : r.high.x) >> (w % 4 / 2 * 4 + w / 4 * 2) & 0x03030303;
            u32 a, b;
            pairs(low | high << 4, 0x64206420, a, b);
            out[2 * w] = mul2(a, d), out[2 * w + 1] = mul2(b, d);
        }
    }
    template <int D> DEV void encode(u8 *tile, int slot, int b, float v, int lane) {
        float d = __fdiv_rn(extreme(v), -32.f);
        u32 q = code(v, inverse(d), 32.5f, 63);
        put_nibbles(field<D, 0, 16>(tile, slot, b), q, lane);
        u32 pair = (q >> 4) | (__shfl_sync(FULL, q, lane | 16) >> 4) << 2;
        u32 far = __shfl_sync(FULL, pair, (lane + 8) % 32);
        if (lane < 8) field<D, 16, 8>(tile, slot, b)[lane] = (u8)(pair | far << 4);
        // The scale is refitted to the codes by least squares with weights v * v.
        float w = v * v, k = (float)q - 32.f;
        float refit = __fdiv_rn(warp_sum(w * v * k), warp_sum(w * k * k));
        if (isfinite(refit)) d = refit;
        if (lane == 0) *(u16 *)field<D, 24, 2>(tile, slot, b) = float_to_half(d);
    }
    DEV bool isfinite(float f) { return fabsf(f) <= 3.4028234e38f; }
};

// Bit 4 of four codes from `bits`, in their bytes.
DEV u32 fifth_bits(u32 bits, int first) { return ((bits >> first & 15) * 0x00204081 & 0x01010101) << 4; }

struct Q5_0 {
    static constexpr int CHUNK = 32;
    struct Raw { uint4 codes; u32 high; u16 d; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int b) {
        return {*(const uint4 *)field<D, 0, 16>(tile, slot, b), *(const u32 *)field<D, 16, 4>(tile, slot, b),
                half_field(field<D, 20, 2>(tile, slot, b))};
    }
    DEV void decode(const Raw &r, u32 (&out)[16]) {
        u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w}, d = twice(r.d);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            u32 low = w < 4 ? words[w] & 0x0f0f0f0f : words[w - 4] >> 4 & 0x0f0f0f0f;
            u32 a, b;
            pairs(low | fifth_bits(r.high, 4 * w), 0x64106410, a, b);
            out[2 * w] = mul2(a, d), out[2 * w + 1] = mul2(b, d);
        }
    }
    template <int D> DEV void encode(u8 *tile, int slot, int b, float v, int lane) {
        float d = __fdiv_rn(extreme(v), -16.f);
        u32 q = code(v, inverse(d), 16.5f, 31), high = __ballot_sync(FULL, q >> 4);
        put_nibbles(field<D, 0, 16>(tile, slot, b), q, lane);
        if (lane == 0) {
            *(u32 *)field<D, 16, 4>(tile, slot, b) = high;
            *(u16 *)field<D, 20, 2>(tile, slot, b) = float_to_half(d);
        }
    }
};

struct Q5_1 {
    static constexpr int CHUNK = 32;
    struct Raw { uint4 codes; u32 high; u16 min, d; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int b) {
        return {*(const uint4 *)field<D, 0, 16>(tile, slot, b), *(const u32 *)field<D, 16, 4>(tile, slot, b),
                half_field(field<D, 20, 2>(tile, slot, b)), half_field(field<D, 22, 2>(tile, slot, b))};
    }
    DEV void decode(const Raw &r, u32 (&out)[16]) {
        u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w}, d = twice(r.d), least = twice(r.min);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            u32 low = w < 4 ? words[w] & 0x0f0f0f0f : words[w - 4] >> 4 & 0x0f0f0f0f;
            u32 a, b;
            pairs(low | fifth_bits(r.high, 4 * w), 0x64006400, a, b);
            out[2 * w] = fma2(a, d, least), out[2 * w + 1] = fma2(b, d, least);
        }
    }
    template <int D> DEV void encode(u8 *tile, int slot, int b, float v, int lane) {
        float least = -warp_max(-v), d = __fdiv_rn(__fadd_rn(warp_max(v), -least), 31.f);
        u32 q = code(__fadd_rn(v, -least), inverse(d), 0.5f, 31), high = __ballot_sync(FULL, q >> 4);
        put_nibbles(field<D, 0, 16>(tile, slot, b), q, lane);
        if (lane == 0) {
            *(u32 *)field<D, 16, 4>(tile, slot, b) = high;
            *(u16 *)field<D, 20, 2>(tile, slot, b) = float_to_half(least);
            *(u16 *)field<D, 22, 2>(tile, slot, b) = float_to_half(d);
        }
    }
};

struct Q4_0 {
    static constexpr int CHUNK = 32;
    struct Raw { uint4 codes; u16 d; };
    template <int D> DEV Raw load(const u8 *tile, int slot, int b) {
        return {*(const uint4 *)field<D, 0, 16>(tile, slot, b), half_field(field<D, 16, 2>(tile, slot, b))};
    }
    DEV void decode(const Raw &r, u32 (&out)[16]) {
        u32 words[4] = {r.codes.x, r.codes.y, r.codes.z, r.codes.w}, d = twice(r.d);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            u32 low = w < 4 ? words[w] & 0x0f0f0f0f : words[w - 4] >> 4 & 0x0f0f0f0f;
            u32 a, b;
            pairs(low, 0x64086408, a, b);
            out[2 * w] = mul2(a, d), out[2 * w + 1] = mul2(b, d);
        }
    }
    template <int D> DEV void encode(u8 *tile, int slot, int b, float v, int lane) {
        float d = __fdiv_rn(extreme(v), -8.f);
        put_nibbles(field<D, 0, 16>(tile, slot, b), code(v, inverse(d), 8.5f, 15), lane);
        if (lane == 0) *(u16 *)field<D, 16, 2>(tile, slot, b) = float_to_half(d);
    }
};

// Orthonormal Walsh-Hadamard transform of every N values of a row in shared memory, by a warp; its own inverse.
template <int D, int N> DEV void hadamard(float *row, int lane) {
    for (int half = 1; half < N; half *= 2) {
        for (int i = lane; i < D / 2; i += WARP) {
            int low = i / half * 2 * half + i % half;
            float a = row[low], b = row[low + half];
            row[low] = a + b, row[low + half] = a - b;
        }
        __syncwarp();
    }
    float scale = rsqrtf((float)N);
    for (int i = lane; i < D; i += WARP) row[i] *= scale;
    __syncwarp();
}

// Format F at head size D, with a rotation in front where N, the size of its blocks, is not 0.
template <class F, int D, int N> struct Codec {
    static constexpr int CHUNK = F::CHUNK;
    static constexpr bool TOKEN_SCALE = false, ROTATED = N != 0;
    typedef typename F::Raw Raw;

    DEV Raw load(const u8 *tile, int slot, int chunk) { return F::template load<D>(tile, slot, chunk); }
    DEV void decode(const Raw &raw, u32 (&out)[CHUNK / 2]) { F::decode(raw, out); }
    DEV float token_scale(const u8 *, int) { return 1.f; }
    DEV void rotate(float *row, int lane) { hadamard<D, N>(row, lane); }
    DEV void rotate_back(float *row, int lane) { hadamard<D, N>(row, lane); }
    DEV void encode(u8 *tile, int slot, float *row, int lane) {
        if constexpr (ROTATED) rotate(row, lane);
        for (int block = 0; block < D / 32; block++) F::template encode<D>(tile, slot, block, row[block * 32 + lane], lane);
    }
};

} // namespace opencoti_kv_scalar
