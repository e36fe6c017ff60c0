//! The codebooks of the IQ types, unpacked at compile time from `iq_grids.bin`.
//!
//! The numbers are ggml's (`ggml-common.h`). The file holds them as indices into each grid's few distinct
//! values and is written by `tests/fixtures/make_quant_vectors.py` from the `gguf` Python package.

static PACKED: [u8; 9216] = *include_bytes!("iq_grids.bin");

const MAGNITUDES_2: [u8; 3] = [8, 25, 43];
const MAGNITUDES_3_XXS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
const MAGNITUDES_3_S: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

pub(super) static IQ2_XXS: [[u8; 8]; 256] = unpack::<2, 8, 256>(0, &MAGNITUDES_2);
pub(super) static IQ2_XS: [[u8; 8]; 512] = unpack::<2, 8, 512>(512, &MAGNITUDES_2);
pub(super) static IQ2_S: [[u8; 8]; 1024] = unpack::<2, 8, 1024>(1536, &MAGNITUDES_2);
/// Ternary digits −1, 0, 1.
pub(super) static IQ1: [[i8; 8]; 2048] = centre(unpack::<2, 8, 2048>(3584, &[0, 1, 2]));
pub(super) static IQ3_XXS: [[u8; 4]; 256] = unpack::<4, 4, 256>(7680, &MAGNITUDES_3_XXS);
pub(super) static IQ3_S: [[u8; 4]; 512] = unpack::<4, 4, 512>(8192, &MAGNITUDES_3_S);

/// `ROWS` rows of `N` values whose indices into `values` lie from byte `at` on, `BITS` bits each, low bits first.
const fn unpack<const BITS: usize, const N: usize, const ROWS: usize>(at: usize, values: &[u8]) -> [[u8; N]; ROWS] {
    let mut grid = [[0; N]; ROWS];
    let mut i = 0;
    while i < ROWS * N {
        let bit = i * BITS;
        let index = PACKED[at + bit / 8] >> (bit % 8) & ((1 << BITS) - 1);
        grid[i / N][i % N] = values[index as usize];
        i += 1;
    }
    grid
}

const fn centre(digits: [[u8; 8]; 2048]) -> [[i8; 8]; 2048] {
    let mut out = [[0; 8]; 2048];
    let mut i = 0;
    while i < 2048 * 8 {
        out[i / 8][i % 8] = digits[i / 8][i % 8] as i8 - 1;
        i += 1;
    }
    out
}
