// Weight formats as the products read them.
//
// A matrix is cut into tiles of 16 rows and units of UNIT columns, and lies row tile by row tile, in each unit by unit. A unit
// has the same bytes as the blocks of the file that it was made from, in another order: first the codes, in the order in which
// the lanes of a warp need them as operand `a` of `mma` (so a warp reads 16 bytes a lane, all in a row), then what the format
// has beside them, row by row. Rows and columns that a matrix lacks are zeros. What a lane loads at a time is a cell: 16 rows of
// 64 columns, four steps.
//
// Lane 4g + t has rows g and g + 8. A step is 16 columns, of which it has 2t, 2t + 1, 2t + 8 and 2t + 9: eight values, in the
// order row g (2t, 2t + 1), row g + 8 (2t, 2t + 1), row g (2t + 8, 2t + 9), row g + 8 (2t + 8, 2t + 9).
//
// Values are decoded to f16 in registers. Integers become f16 exactly: as the low bits of 1024 (0x6400), which is then taken off.
#pragma once
#include "common.cuh"

// Row of the tile and column of the step that element `e` of a lane's eight is.
DEV int element_row(int lane, int e) { return lane / 4 + (e / 2 % 2) * 8; }
DEV int element_column(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 4 * 8; }

// Eight 4-bit codes of a word as pairs of 1024 + code: pair p is nibbles p and p + 4.
DEV void nibbles(u32 word, u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = (word >> 4 * p & 0x000f000f) | 0x64006400;
}

// Where a nibble of a lane's word goes: pair p is elements 2p and 2p + 1.
DEV int nibble_of_element(int e) { return e / 2 + e % 2 * 4; }

DEV u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEV u16 half_at(const u8 *p) { return (u16)(p[0] | p[1] << 8); }

// What packing asks of a format: `code`, the bits of a row's code at column `k`, from the blocks of the file; and `word`, the
// `i`th word of a unit, from a source with
//   code(step, lane, element)   a code, 0 outside the matrix
//   block(row, block)           a row's block in the unit, null outside the matrix
//   half(row, block, at)        the half at a byte of a block, 0 outside the matrix

struct Q4_0 {
    static constexpr int UNIT = 64, BYTES = 16 * 2 * 18, BLOCK = 32, BLOCK_BYTES = 18;
    struct Raw { uint4 codes; u32 low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const u32 *scales = (const u32 *)(unit + 512);
        return {((const uint4 *)unit)[lane], scales[lane / 4], scales[lane / 4 + 8]};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = step < 2 ? both_low(r.low) : both_high(r.low);
        u32 high = step < 2 ? both_low(r.high) : both_high(r.high);
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++) a[p] = mul2(sub2(a[p], 0x64086408), p % 2 ? high : low);
    }
    DEV u32 code(const u8 *row, int k) {
        u8 byte = row[k / 32 * 18 + 2 + k % 16];
        return k % 32 < 16 ? byte & 15 : byte >> 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 128) {
            u32 bits = 0;
            for (int e = 0; e < 8; e++) bits |= source.code(i % 4, i / 4, e) << 4 * nibble_of_element(e);
            return bits;
        }
        return source.half(i - 128, 0, 0) | (u32)source.half(i - 128, 1, 0) << 16;
    }
};

struct Q4_1 {
    static constexpr int UNIT = 64, BYTES = 16 * 2 * 20, BLOCK = 32, BLOCK_BYTES = 20;
    struct Raw { uint4 codes; uint2 low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint2 *scales = (const uint2 *)(unit + 512);
        return {((const uint4 *)unit)[lane], scales[lane / 4], scales[lane / 4 + 8]};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = step < 2 ? r.low.x : r.low.y, high = step < 2 ? r.high.x : r.high.y;
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 s = p % 2 ? high : low;
            a[p] = fma2(sub2(a[p], 0x64006400), both_low(s), both_high(s));
        }
    }
    DEV u32 code(const u8 *row, int k) {
        u8 byte = row[k / 32 * 20 + 4 + k % 16];
        return k % 32 < 16 ? byte & 15 : byte >> 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 128) {
            u32 bits = 0;
            for (int e = 0; e < 8; e++) bits |= source.code(i % 4, i / 4, e) << 4 * nibble_of_element(e);
            return bits;
        }
        int row = (i - 128) / 2, block = i % 2;
        return source.half(row, block, 0) | (u32)source.half(row, block, 2) << 16;
    }
};

// The fifth bits of a cell: a word a lane, that of pair p in step s at bit 4s + p, for its second element 16 higher. Brings two of
// them to bits 4 and 20.
DEV u32 fifth_bits(u32 word, int step, int pair) {
    int at = 4 * step + pair;
    return (at < 4 ? word << (4 - at) : word >> (at - 4)) & 0x00100010;
}
template <class S> DEV u32 fifth_bits_word(int first_step, int lane, const S &source) {
    u32 bits = 0;
    for (int s = 0; s < 4; s++)
        for (int e = 0; e < 8; e++) bits |= (source.code(first_step + s, lane, e) >> 4) << (4 * s + e / 2 + e % 2 * 16);
    return bits;
}
template <class S> DEV u32 nibbles_word(int step, int lane, const S &source) {
    u32 bits = 0;
    for (int e = 0; e < 8; e++) bits |= (source.code(step, lane, e) & 15) << 4 * nibble_of_element(e);
    return bits;
}

struct Q5_0 {
    static constexpr int UNIT = 64, BYTES = 16 * 2 * 22, BLOCK = 32, BLOCK_BYTES = 22;
    struct Raw { uint4 codes; u32 fifth, low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const u32 *fifth = (const u32 *)(unit + 512), *scales = (const u32 *)(unit + 640);
        return {((const uint4 *)unit)[lane], fifth[lane], scales[lane / 4], scales[lane / 4 + 8]};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = step < 2 ? both_low(r.low) : both_high(r.low);
        u32 high = step < 2 ? both_low(r.high) : both_high(r.high);
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++)
            a[p] = mul2(sub2(a[p] | fifth_bits(r.fifth, step, p), 0x64106410), p % 2 ? high : low);
    }
    DEV u32 code(const u8 *row, int k) {
        row += k / 32 * 22;
        u8 byte = row[6 + k % 16];
        return (k % 32 < 16 ? byte & 15 : byte >> 4) | (u32)(row[2 + k % 32 / 8] >> k % 8 & 1) << 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 128) return nibbles_word(i % 4, i / 4, source);
        if (i < 160) return fifth_bits_word(0, i - 128, source);
        return source.half(i - 160, 0, 0) | (u32)source.half(i - 160, 1, 0) << 16;
    }
};

struct Q5_1 {
    static constexpr int UNIT = 64, BYTES = 16 * 2 * 24, BLOCK = 32, BLOCK_BYTES = 24;
    struct Raw { uint4 codes; u32 fifth; uint2 low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const u32 *fifth = (const u32 *)(unit + 512);
        const uint2 *scales = (const uint2 *)(unit + 640);
        return {((const uint4 *)unit)[lane], fifth[lane], scales[lane / 4], scales[lane / 4 + 8]};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = step < 2 ? r.low.x : r.low.y, high = step < 2 ? r.high.x : r.high.y;
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 s = p % 2 ? high : low;
            a[p] = fma2(sub2(a[p] | fifth_bits(r.fifth, step, p), 0x64006400), both_low(s), both_high(s));
        }
    }
    DEV u32 code(const u8 *row, int k) {
        row += k / 32 * 24;
        u8 byte = row[8 + k % 16];
        return (k % 32 < 16 ? byte & 15 : byte >> 4) | (u32)(row[4 + k % 32 / 8] >> k % 8 & 1) << 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 128) return nibbles_word(i % 4, i / 4, source);
        if (i < 160) return fifth_bits_word(0, i - 128, source);
        int row = (i - 160) / 2, block = i % 2;
        return source.half(row, block, 0) | (u32)source.half(row, block, 2) << 16;
    }
};

struct Q8_0 {
    static constexpr int UNIT = 64, BYTES = 16 * 2 * 34, BLOCK = 32, BLOCK_BYTES = 34;
    struct Raw { uint4 codes[2]; u32 low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint4 *codes = (const uint4 *)unit;
        const u32 *scales = (const u32 *)(unit + 1024);
        return {{codes[lane], codes[32 + lane]}, scales[lane / 4], scales[lane / 4 + 8]};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = step < 2 ? both_low(r.low) : both_high(r.low);
        u32 high = step < 2 ? both_low(r.high) : both_high(r.high);
        const uint4 &codes = r.codes[step / 2];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 word = word_of(codes, step % 2 * 2 + p / 2);
            u32 pair = __byte_perm(word, 0x64646464, p % 2 ? 0x4342 : 0x4140);
            a[p] = mul2(sub2(pair, 0x64806480), p % 2 ? high : low);
        }
    }
    // Codes are kept with 128 added.
    DEV u32 code(const u8 *row, int k) { return row[k / 32 * 34 + 2 + k % 32] ^ 0x80; }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 256) {
            int in_vector = i % 4, lane = i / 4 % 32, step = i / 128 * 2 + in_vector / 2;
            u32 bits = 0;
            for (int b = 0; b < 4; b++) bits |= source.code(step, lane, in_vector % 2 * 4 + b) << 8 * b;
            return bits;
        }
        return source.half(i - 256, 0, 0) | (u32)source.half(i - 256, 1, 0) << 16;
    }
};

// 256 values: f16 scale and minimum, 6-bit factors of both for each 32.
struct Q4_K {
    static constexpr int UNIT = 256, BYTES = 16 * 144, BLOCK = 256, BLOCK_BYTES = 144;
    // The last two: scale and negative minimum of a row, and four factors of the cell.
    struct Raw { uint4 codes; uint2 low, high; };

    DEV uint2 cell_factors(const uint4 &s, int cell) {
        u32 first = cell < 2 ? s.y : cell == 2 ? s.z : s.w, second = cell < 2 ? s.z : s.w;
        return make_uint2(s.x, __funnelshift_r(first, second, cell * 24 % 32));
    }
    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint4 *codes = (const uint4 *)unit + cell * 32, *rows = (const uint4 *)(unit + 2048);
        return {codes[lane], cell_factors(rows[lane / 4], cell), cell_factors(rows[lane / 4 + 8], cell)};
    }
    // Scale and negative minimum of 32 values.
    DEV u32 factors(uint2 f, int half) {
        u32 bits = f.y >> 12 * half;
        return mul2(sub2((bits & 0x3f) | (bits << 10 & 0x3f0000) | 0x64006400, 0x64006400), f.x);
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = factors(r.low, step / 2), high = factors(r.high, step / 2);
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 f = p % 2 ? high : low;
            a[p] = fma2(sub2(a[p], 0x64006400), both_low(f), both_high(f));
        }
    }
    DEV u32 code(const u8 *row, int k) {
        u8 byte = row[k / 256 * 144 + 16 + k % 256 / 64 * 32 + k % 32];
        return k % 64 < 32 ? byte & 15 : byte >> 4;
    }
    // Six-bit factor `j` of a block: scale of run j, or from 8 on minimum of run j - 8.
    DEV u32 six_bits(const u8 *s, int j) {
        int run = j % 8, minimum = j / 8;
        if (run < 4) return s[run + 4 * minimum] & 63;
        u8 low = s[run + 4];
        return (minimum ? low >> 4 : low & 15) | (s[run - 4 + 4 * minimum] >> 6) << 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 512) {
            u32 bits = 0;
            for (int e = 0; e < 8; e++) bits |= source.code(i / 128 * 4 + i % 4, i / 4 % 32, e) << 4 * nibble_of_element(e);
            return bits;
        }
        return factor_word(i - 512, source);
    }
    template <class S> DEV u32 factor_word(int i, const S &source) {
        const u8 *row = source.block(i / 4, 0);
        if (!row) return 0;
        int part = i % 4;
        if (part == 0) return half_at(row) | (u32)(half_at(row + 2) ^ 0x8000) << 16;
        // A stream of scale, minimum, scale, minimum ..., six bits each.
        u32 bits = 0;
        for (int b = 0; b < 32; b++) {
            int at = (part - 1) * 32 + b, field = at / 6;
            bits |= (six_bits(row + 4, field / 2 + field % 2 * 8) >> at % 6 & 1) << b;
        }
        return bits;
    }
};

// As Q4_K, with a fifth bit of each code.
struct Q5_K {
    static constexpr int UNIT = 256, BYTES = 16 * 176, BLOCK = 256, BLOCK_BYTES = 176;
    struct Raw { uint4 codes; u32 fifth; uint2 low, high; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint4 *codes = (const uint4 *)unit + cell * 32, *rows = (const uint4 *)(unit + 2560);
        const u32 *fifth = (const u32 *)(unit + 2048) + cell * 32;
        return {codes[lane], fifth[lane], Q4_K::cell_factors(rows[lane / 4], cell), Q4_K::cell_factors(rows[lane / 4 + 8], cell)};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 low = Q4_K::factors(r.low, step / 2), high = Q4_K::factors(r.high, step / 2);
        nibbles(word_of(r.codes, step), a);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 f = p % 2 ? high : low;
            a[p] = fma2(sub2(a[p] | fifth_bits(r.fifth, step, p), 0x64006400), both_low(f), both_high(f));
        }
    }
    DEV u32 code(const u8 *row, int k) {
        row += k / 256 * 176;
        u8 byte = row[48 + k % 256 / 64 * 32 + k % 32];
        return (k % 64 < 32 ? byte & 15 : byte >> 4) | (u32)(row[16 + k % 32] >> k % 256 / 32 & 1) << 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        if (i < 512) return nibbles_word(i / 128 * 4 + i % 4, i / 4 % 32, source);
        if (i < 640) return fifth_bits_word((i - 512) / 32 * 4, i % 32, source);
        return Q4_K::factor_word(i - 640, source);
    }
};

// 256 values: f16 scale, 8-bit factors of it for each 16, 6-bit codes.
struct Q6_K {
    static constexpr int UNIT = 256, BYTES = 16 * 210, BLOCK = 256, BLOCK_BYTES = 210;
    struct Raw { uint4 codes; uint2 high_bits; u32 low, high, scales; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint4 *codes = (const uint4 *)unit + cell * 32;
        const uint2 *high_bits = (const uint2 *)(unit + 2048) + cell * 32;
        const u32 *factors = (const u32 *)(unit + 3072);
        const u16 *scales = (const u16 *)(unit + 3328);
        int g = lane / 4;
        return {codes[lane], high_bits[lane], factors[g * 4 + cell], factors[(g + 8) * 4 + cell],
                scales[g] | (u32)scales[g + 8] << 16};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        u32 word = word_of(r.codes, step), high_bits = step < 2 ? r.high_bits.x : r.high_bits.y;
        // Factors of both rows, kept with 128 added.
        u32 pair = __byte_perm(r.low, r.high, step | (4 + step) << 4);
        pair = __byte_perm(pair, 0x64646464, 0x4140);
        u32 factors = mul2(sub2(pair, 0x64806480), r.scales);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            int at = 2 * (p + step % 2 * 4);
            u32 bits = at < 4 ? high_bits << (4 - at) : high_bits >> (at - 4);
            u32 code = (word >> 4 * p & 0x000f000f) | (bits & 0x00300030) | 0x64006400;
            a[p] = mul2(sub2(code, 0x64206420), p % 2 ? both_high(factors) : both_low(factors));
        }
    }
    DEV u32 code(const u8 *row, int k) {
        row += k / 256 * 210;
        int half = k % 256 / 128, quarter = k % 128 / 32, i = k % 32;
        u8 low = row[half * 64 + quarter % 2 * 32 + i];
        u8 high = row[128 + half * 32 + i] >> 2 * quarter & 3;
        return (quarter < 2 ? low & 15 : low >> 4) | high << 4;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        u32 bits = 0;
        if (i < 512) {
            for (int e = 0; e < 8; e++) bits |= (source.code(i / 128 * 4 + i % 4, i / 4 % 32, e) & 15) << 4 * nibble_of_element(e);
            return bits;
        }
        if (i < 768) {
            int j = i - 512, pair_of_steps = j / 64 * 2 + j % 2, lane = j / 2 % 32;
            for (int s = 0; s < 2; s++)
                for (int e = 0; e < 8; e++)
                    bits |= (source.code(pair_of_steps * 2 + s, lane, e) >> 4) << (2 * (e / 2 + 4 * s) + e % 2 * 16);
            return bits;
        }
        if (i < 832) {
            const u8 *row = source.block((i - 768) / 4, 0);
            if (!row) return 0x80808080;
            for (int b = 0; b < 4; b++) bits |= (u32)(row[192 + i % 4 * 4 + b] ^ 0x80) << 8 * b;
            return bits;
        }
        for (int h = 0; h < 2; h++) bits |= (u32)source.half((i - 832) * 2 + h, 0, 208) << 16 * h;
        return bits;
    }
};

// Halves as they are; bfloat16 and f32 are rounded to f16 when they are packed.
template <int SOURCE_BYTES> struct Halves {
    static constexpr int UNIT = 64, BYTES = 16 * 64 * 2, BLOCK = 1, BLOCK_BYTES = SOURCE_BYTES;
    struct Raw { uint4 steps[4]; };

    DEV Raw load(const u8 *unit, int cell, int lane) {
        const uint4 *v = (const uint4 *)unit;
        return {{v[lane], v[32 + lane], v[64 + lane], v[96 + lane]}};
    }
    DEV void fragment(const Raw &r, int step, u32 (&a)[4]) {
        const uint4 &v = r.steps[step];
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
    template <class S> DEV u32 word(int i, const S &source) {
        int lane = i / 4 % 32, step = i / 128, p = i % 4;
        return source.code(step, lane, 2 * p) | source.code(step, lane, 2 * p + 1) << 16;
    }
};

DEV u16 finite_half(float f) { return float_to_half(fminf(fmaxf(f, -65504.f), 65504.f)); }

struct F16 : Halves<2> {
    DEV u32 code(const u8 *row, int k) { return half_at(row + 2 * k); }
};
struct BF16 : Halves<2> {
    DEV u32 code(const u8 *row, int k) { return finite_half(__int_as_float((int)((u32)half_at(row + 2 * k) << 16))); }
};
struct F32 : Halves<4> {
    DEV u32 code(const u8 *row, int k) {
        row += 4 * k;
        return finite_half(__int_as_float((int)(row[0] | row[1] << 8 | row[2] << 16 | (u32)row[3] << 24)));
    }
};
