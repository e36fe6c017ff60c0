//! Microscaling types: 4-bit floats (E2M1: sign, two bits of exponent, one of mantissa) under an 8-bit float scale.
//! OCP Microscaling Formats 1.0 for MXFP4; ggml's block of four NVIDIA groups for NVFP4.

/// Twice the value of each E2M1 code, so that all are whole numbers; the scales below are halved in turn.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// One E8M0 scale (2^(e − 127)), 16 bytes of codes: values 0..16 in the low nibbles, 16..32 in the high ones.
#[inline(always)]
pub(super) fn mxfp4(b: &[u8; 17], v: &mut [f32; 32]) {
    let d = e8m0_half(b[0]);
    for i in 0..16 {
        v[i] = d * f32::from(E2M1_DOUBLED[usize::from(b[1 + i] & 15)]);
        v[i + 16] = d * f32::from(E2M1_DOUBLED[usize::from(b[1 + i] >> 4)]);
    }
}

/// Half of 2^(e − 127); the two smallest are subnormal.
#[inline(always)]
pub fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Four unsigned E4M3 scales, then four groups of 16 values in 8 bytes: low nibbles first, high nibbles after them.
/// A tensor of this type may come with a multiplier of its own (`NAME.scale`), which is not part of the block.
#[inline(always)]
pub(super) fn nvfp4(b: &[u8; 36], v: &mut [f32; 64]) {
    for (g, group) in v.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let d = ue4m3_half(b[g]);
        for i in 0..8 {
            let codes = b[4 + g * 8 + i];
            group[i] = d * f32::from(E2M1_DOUBLED[usize::from(codes & 15)]);
            group[i + 8] = d * f32::from(E2M1_DOUBLED[usize::from(codes >> 4)]);
        }
    }
}

/// Half of an unsigned E4M3 number (bias 7); the code of NaN reads as zero, as in ggml.
#[inline(always)]
pub fn ue4m3_half(x: u8) -> f32 {
    if x == 0x7F {
        return 0.0;
    }
    let (exponent, mantissa) = (u32::from(x >> 3 & 15), x & 7);
    if exponent == 0 {
        return f32::from(mantissa) * (1.0 / 1024.0);
    }
    f32::from_bits((exponent + 127 - 7 - 1) << 23 | u32::from(mantissa) << 20)
}
