//! Codes of a row as planes of bits.
//!
//! A code of 3 bits is one of 2 and one of 1, 5 are 4 and 1, 6 are 4 and 2; 2, 4 and 8 are one plane. A plane of `w`
//! bits has `8 / w` columns in a byte, a whole part of the row apart: byte `j` of a plane of `n` bytes holds columns `j`,
//! `j + n`, `j + 2 * n`, …, the first in the lowest bits. A vector of bytes is then unpacked by a shift and a mask for
//! each part. The low bits of the codes come first.

/// Bytes of a row of `columns` codes.
pub const fn row_bytes(bits: usize, columns: usize) -> usize {
    columns * bits / 8
}

/// Packs the codes of a row, each below `2^bits`.
pub fn pack(bits: usize, codes: &[u8], row: &mut [u8]) {
    let mut at = 0;
    let mut shift = 0;
    for &width in planes(bits) {
        let n = codes.len() * width / 8;
        pack_plane(width, shift, codes, &mut row[at..at + n]);
        at += n;
        shift += width;
    }
}

/// Unpacks a row of codes of `BITS` bits: 2, 3, 4, 5, 6 or 8.
#[inline(always)]
pub fn unpack<const BITS: usize>(row: &[u8], codes: &mut [u8]) {
    let n = codes.len();
    match BITS {
        8 => codes.copy_from_slice(row),
        4 => put_plane::<4, 0>(row, codes),
        2 => put_plane::<2, 0>(row, codes),
        3 => {
            put_plane::<2, 0>(&row[..n / 4], codes);
            put_plane::<1, 2>(&row[n / 4..], codes);
        }
        5 => {
            put_plane::<4, 0>(&row[..n / 2], codes);
            put_plane::<1, 4>(&row[n / 2..], codes);
        }
        _ => {
            put_plane::<4, 0>(&row[..n / 2], codes);
            put_plane::<2, 4>(&row[n / 2..], codes);
        }
    }
}

/// Widths of the planes, that of the lowest bits first.
fn planes(bits: usize) -> &'static [usize] {
    match bits {
        2 => &[2],
        3 => &[2, 1],
        4 => &[4],
        5 => &[4, 1],
        6 => &[4, 2],
        _ => &[8],
    }
}

/// Bits `shift .. shift + width` of each code.
fn pack_plane(width: usize, shift: usize, codes: &[u8], plane: &mut [u8]) {
    let mask = (1u16 << width) as u8;
    let mask = mask.wrapping_sub(1);
    plane.fill(0);
    for (part, codes) in codes.chunks_exact(plane.len()).enumerate() {
        for (byte, code) in plane.iter_mut().zip(codes) {
            *byte |= ((code >> shift) & mask) << (part * width);
        }
    }
}

/// Puts a plane of `WIDTH` bits to bit `SHIFT` of the codes; the first plane of a row sets the other bits to zero.
#[inline(always)]
fn put_plane<const WIDTH: usize, const SHIFT: usize>(plane: &[u8], codes: &mut [u8]) {
    let mask = (1u8 << WIDTH) - 1;
    for (part, codes) in codes.chunks_exact_mut(plane.len()).enumerate() {
        for (byte, code) in plane.iter().zip(codes) {
            let bits = ((byte >> (part * WIDTH)) & mask) << SHIFT;
            *code = if SHIFT == 0 { bits } else { *code | bits };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back_at_every_width() {
        fn check<const BITS: usize>() {
            for columns in [32, 64, 96, 128] {
                let codes: Vec<u8> = (0..columns).map(|i| ((i * 37 + 11) % (1 << BITS)) as u8).collect();
                let mut row = vec![0xa5; row_bytes(BITS, columns)];
                pack(BITS, &codes, &mut row);
                let mut back = vec![0xff; columns];
                unpack::<BITS>(&row, &mut back);
                assert_eq!(codes, back, "{BITS} bits, {columns} columns");
            }
        }
        check::<2>();
        check::<3>();
        check::<4>();
        check::<5>();
        check::<6>();
        check::<8>();
    }
}
