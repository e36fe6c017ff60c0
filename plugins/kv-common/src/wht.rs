//! The Walsh–Hadamard transform.

/// Size of the blocks in which a row of `head_dim` values is transformed: the largest power of two that divides it.
pub fn block_size(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// Orthonormal transform of every `block` values of `row`, in natural order. Its own inverse.
///
/// Entry `(i, j)` of the matrix is `(-1)^popcount(i & j) / sqrt(block)`; `block` is a power of two that divides the
/// row's length.
pub fn wht(row: &mut [f32], block: usize) {
    let scale = 1.0 / (block as f32).sqrt();
    for values in row.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for pair in values.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for v in values {
            *v *= scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_largest_power_of_two_that_divides() {
        assert_eq!([32, 64, 96, 128, 160, 256, 512, 576].map(block_size), [32, 64, 32, 128, 32, 256, 512, 64]);
    }

    #[test]
    fn the_matrix_is_sylvesters() {
        for i in 0..32 {
            let mut row = [0.0; 32];
            row[i] = 1.0;
            wht(&mut row, 32);
            for (j, &v) in row.iter().enumerate() {
                let sign = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                assert!((v - sign / 32f32.sqrt()).abs() < 1e-7);
            }
        }
    }
}
