//! Balancing a tile: factors of its rows and columns after whose division all of them vary alike.
//!
//! Rows and columns are divided in turn by their standard deviation; the factors with the least imbalance on the way are
//! kept. The first releases could not raise what is below e^-0.3: tiles of small values, which the values of many layers
//! are, stayed unbalanced. [`Bounds::WIDE`] lets factors go as far as half floats do.

/// Most rows or columns of a tile.
pub const SIDE: usize = 128;
/// Lanes of the sums; fixed, so that every instruction set finds the same.
const LANES: usize = 8;
/// Least deviation in an imbalance.
const LEAST: f32 = 1e-8;

/// How far balancing goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bounds {
    /// Bounds of the logarithm of a factor.
    pub log: (f32, f32),
    /// Bounds of a deviation.
    pub deviation: (f32, f32),
    /// Rounds.
    pub rounds: usize,
}

impl Bounds {
    /// Tiles of any magnitude.
    pub const WIDE: Bounds = Bounds { log: (-12.0, 12.0), deviation: (1e-6, 1e6), rounds: 4 };
    /// The constants of the first releases.
    pub const REFERENCE: Bounds = Bounds { log: (-0.3, 10.0), deviation: (1e-3, 1e3), rounds: 16 };
}

/// Factors of a tile's rows and columns.
#[derive(Clone, Debug)]
pub struct Factors {
    /// Of the rows.
    pub rows: [f32; SIDE],
    /// Of the columns.
    pub columns: [f32; SIDE],
    /// Imbalance after their division: the ratio of the largest to the smallest deviation, columns and rows added.
    pub imbalance: f32,
}

/// Factors of a tile of `columns` columns, a multiple of 8 up to [`SIDE`], row after row.
#[inline(always)]
pub fn balance(tile: &[f32], columns: usize, bounds: &Bounds) -> Factors {
    let rows = tile.len() / columns;
    assert!(rows <= SIDE && columns <= SIDE && columns.is_multiple_of(LANES) && rows * columns == tile.len());
    // Reciprocal factors and their logarithms; `of_*` are deviations without the factors of their own axis.
    let (mut by_row, mut by_column) = ([1.0; SIDE], [1.0; SIDE]);
    let (mut log_row, mut log_column) = ([0f32; SIDE], [0f32; SIDE]);
    let (mut of_rows, mut of_columns) = ([0.0; SIDE], [0.0; SIDE]);
    row_deviations(tile, columns, &by_column[..columns], &mut of_rows[..rows]);
    column_deviations(tile, columns, &by_row[..rows], &mut of_columns[..columns]);
    let spread = |of_rows: &[f32; SIDE], of_columns: &[f32; SIDE], by_row: &[f32; SIDE], by_column: &[f32; SIDE]| {
        ratio(&of_columns[..columns], &by_column[..columns]) + ratio(&of_rows[..rows], &by_row[..rows])
    };
    let mut best = Factors {
        rows: [1.0; SIDE],
        columns: [1.0; SIDE],
        imbalance: spread(&of_rows, &of_columns, &by_row, &by_column),
    };
    for _ in 0..bounds.rounds {
        divide(&of_columns[..columns], &mut log_column[..columns], &mut by_column[..columns], bounds);
        row_deviations(tile, columns, &by_column[..columns], &mut of_rows[..rows]);
        divide(&of_rows[..rows], &mut log_row[..rows], &mut by_row[..rows], bounds);
        column_deviations(tile, columns, &by_row[..rows], &mut of_columns[..columns]);
        let imbalance = spread(&of_rows, &of_columns, &by_row, &by_column);
        if imbalance <= best.imbalance {
            best = Factors { rows: log_row.map(f32::exp), columns: log_column.map(f32::exp), imbalance };
        }
    }
    best
}

/// Takes the deviations of one axis into its factors.
fn divide(deviations: &[f32], logs: &mut [f32], reciprocals: &mut [f32], bounds: &Bounds) {
    for ((&deviation, log), by) in deviations.iter().zip(logs).zip(reciprocals) {
        let deviation = (deviation * *by).clamp(bounds.deviation.0, bounds.deviation.1);
        *log = (*log + deviation.ln()).clamp(bounds.log.0, bounds.log.1);
        *by = (-*log).exp();
    }
}

/// The largest over the smallest deviation of an axis.
fn ratio(deviations: &[f32], reciprocals: &[f32]) -> f32 {
    let scaled = deviations.iter().zip(reciprocals).map(|(d, by)| d * by);
    let (least, most) = scaled.fold((f32::INFINITY, 0f32), |(least, most), d| (least.min(d), most.max(d)));
    most / least.max(LEAST)
}

/// Standard deviation of each row after its columns were multiplied by `by`.
#[inline(always)]
fn row_deviations(tile: &[f32], columns: usize, by: &[f32], out: &mut [f32]) {
    for (row, out) in tile.chunks_exact(columns).zip(out) {
        let mut sums = [0.0; LANES];
        for (x, by) in row.as_chunks::<LANES>().0.iter().zip(by.as_chunks::<LANES>().0) {
            for l in 0..LANES {
                sums[l] += x[l] * by[l];
            }
        }
        let mean = sums.iter().sum::<f32>() / columns as f32;
        let mut squares = [0.0; LANES];
        for (x, by) in row.as_chunks::<LANES>().0.iter().zip(by.as_chunks::<LANES>().0) {
            for l in 0..LANES {
                let d = x[l] * by[l] - mean;
                squares[l] += d * d;
            }
        }
        *out = deviation(squares.iter().sum(), columns);
    }
}

/// Standard deviation of each column after its rows were multiplied by `by`.
#[inline(always)]
fn column_deviations(tile: &[f32], columns: usize, by: &[f32], out: &mut [f32]) {
    let (mut means, mut squares) = ([0.0; SIDE], [0.0; SIDE]);
    for (row, &by) in tile.chunks_exact(columns).zip(by) {
        for (sum, x) in means[..columns].iter_mut().zip(row) {
            *sum += x * by;
        }
    }
    means.iter_mut().for_each(|m| *m /= by.len() as f32);
    for (row, &by) in tile.chunks_exact(columns).zip(by) {
        for ((sum, x), mean) in squares[..columns].iter_mut().zip(row).zip(&means) {
            let d = x * by - mean;
            *sum += d * d;
        }
    }
    for (out, &sum) in out.iter_mut().zip(&squares) {
        *out = deviation(sum, by.len());
    }
}

/// Of a sample of `n`, from its squared differences.
fn deviation(squares: f32, n: usize) -> f32 {
    (squares / (n - 1) as f32).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use opencoti_kv_common::wht;

    /// The rotated K tile of the golden vectors, by channel.
    fn golden() -> Vec<f32> {
        let mut tile = vec![0.0; SIDE * SIDE];
        for t in 0..SIDE {
            let mut row: Vec<f32> = (0..SIDE)
                .map(|c| {
                    let n = (131 * t + 37 * c + 5 * ((t * c) % 17)) % 257;
                    let gain = if c % 8 == 3 { 8.0 } else { 1.0 } * if t % 5 == 2 { 1.5 } else { 1.0 };
                    (n as f32 - 128.0) / 32.0 * gain
                })
                .collect();
            wht(&mut row, SIDE);
            (0..SIDE).for_each(|c| tile[c * SIDE + t] = row[c]);
        }
        tile
    }

    #[test]
    fn the_imbalance_falls_as_published() {
        let tile = golden();
        let after = |rounds| balance(&tile, SIDE, &Bounds { rounds, ..Bounds::REFERENCE }).imbalance;
        for (rounds, expected) in [(0, 5.51636), (1, 2.59126), (2, 2.36810), (4, 2.33216), (16, 2.25170)] {
            assert!((after(rounds) / expected - 1.0).abs() < 2e-5, "{rounds} rounds: {}", after(rounds));
        }
    }

    #[test]
    fn a_tile_of_any_magnitude_is_balanced_alike() {
        let tile = golden();
        let at = |by: f32, bounds| {
            let scaled: Vec<f32> = tile.iter().map(|x| x * by).collect();
            balance(&scaled, SIDE, &bounds).imbalance
        };
        let expected = at(1.0, Bounds::WIDE);
        for by in [1e-3, 0.1, 30.0] {
            assert!((at(by, Bounds::WIDE) / expected - 1.0).abs() < 0.02, "{by}");
        }
        assert!(at(1e-2, Bounds::REFERENCE) > 1.5 * expected, "the reference cannot raise small tiles");
    }
}
