//! What is done to the channels of keys or values before a codec stores them, and undone when they are read.
//!
//! Stored is `(x - offset) * factor`. Real keys have channels that are far from zero in every token, and channels far larger than
//! the rest; a codec spends its few levels on both. Neither changes what attention gives: queries are divided by the
//! factors, and what an offset adds to the scores of a query is added again, so that keys with and without one may be read
//! in one softmax; the sum of values is divided by the factors, and gets the offset as often as there are weights.
//!
//! No codec knows of it, so it is there for all of them.

use std::sync::Arc;

/// The channels of a layer; `None` where they are stored as they are.
#[derive(Clone, Debug, Default)]
pub struct LayerChannels {
    /// Of the keys.
    pub k: Option<Arc<Channels>>,
    /// Of the values.
    pub v: Option<Arc<Channels>>,
}

/// Offsets and factors of every KV head of one side of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Channels {
    head_dim: usize,
    /// One for each channel of each head; zeros when there are none.
    offsets: Vec<f32>,
    factors: Vec<f32>,
    inverses: Vec<f32>,
}

impl Channels {
    /// Offsets and factors, `n_heads * head_dim` of each; `None` leaves the channels as they are.
    ///
    /// # Errors
    /// A sentence about a wrong number of them, or a value that can't be undone.
    pub fn new(
        n_heads: usize,
        head_dim: usize,
        offsets: Option<Vec<f32>>,
        factors: Option<Vec<f32>>,
    ) -> Result<Self, String> {
        let n = n_heads * head_dim;
        let offsets = offsets.unwrap_or_else(|| vec![0.0; n]);
        let factors = factors.unwrap_or_else(|| vec![1.0; n]);
        for (what, values) in [("offsets", &offsets), ("factors", &factors)] {
            if values.len() != n {
                return Err(format!("there are {} {what} of channels, expected {n_heads} x {head_dim}", values.len()));
            }
        }
        let inverses: Vec<f32> = factors.iter().map(|f| f.recip()).collect();
        if let Some(offset) = offsets.iter().find(|o| !o.is_finite()) {
            return Err(format!("a channel has the offset {offset}"));
        }
        if let Some((factor, _)) = factors.iter().zip(&inverses).find(|(f, i)| !(**f > 0.0 && i.is_normal())) {
            return Err(format!("a channel has the factor {factor}, expected one that can be divided by"));
        }
        Ok(Channels { head_dim, offsets, factors, inverses })
    }

    /// KV heads.
    pub fn n_heads(&self) -> usize {
        self.offsets.len() / self.head_dim
    }

    /// Values of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn of<'a>(&self, values: &'a [f32], head: usize) -> &'a [f32] {
        &values[head * self.head_dim..][..self.head_dim]
    }

    /// Makes a head's row what is stored of it.
    pub fn store(&self, head: usize, row: &mut [f32]) {
        let channels = self.of(&self.offsets, head).iter().zip(self.of(&self.factors, head));
        for (x, (offset, factor)) in row.iter_mut().zip(channels) {
            *x = (*x - offset) * factor;
        }
    }

    /// Brings a query to the stored keys of a head; gives what is to be added to its scores.
    pub fn query(&self, head: usize, query: &mut [f32]) -> f32 {
        let added = query.iter().zip(self.of(&self.offsets, head)).map(|(q, offset)| q * offset).sum();
        query.iter_mut().zip(self.of(&self.inverses, head)).for_each(|(q, inverse)| *q *= inverse);
        added
    }

    /// Brings a sum of a head's stored values, with weights of the sum `weights`, to the sum of the values.
    pub fn output(&self, head: usize, weights: f32, sum: &mut [f32]) {
        let channels = self.of(&self.offsets, head).iter().zip(self.of(&self.inverses, head));
        for (sum, (offset, inverse)) in sum.iter_mut().zip(channels) {
            *sum = *sum * inverse + weights * offset;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_sums_are_those_of_the_plain_rows() {
        let channels = Channels::new(2, 2, Some(vec![9.0, 9.0, 1.0, -2.0]), Some(vec![9.0, 9.0, 4.0, 0.5])).unwrap();
        let (x, mut stored, mut q) = ([3.0, 5.0], [3.0, 5.0], [2.0, -1.0]);
        channels.store(1, &mut stored);
        assert_eq!(stored, [8.0, 3.5]);
        let added = channels.query(1, &mut q);
        assert_eq!(added + q[0] * stored[0] + q[1] * stored[1], 2.0 * 3.0 - 5.0);
        let mut sum = stored.map(|v| 0.75 * v);
        channels.output(1, 0.75, &mut sum);
        assert_eq!(sum, x.map(|v| 0.75 * v));
    }

    #[test]
    fn what_cannot_be_undone_is_refused() {
        let refused =
            |offsets: Vec<f32>, factors: Vec<f32>| Channels::new(1, 2, Some(offsets), Some(factors)).unwrap_err();
        assert!(refused(vec![0.0; 3], vec![1.0; 2]).contains("3 offsets"));
        assert!(refused(vec![0.0; 2], vec![1.0]).contains("1 factors"));
        assert!(refused(vec![f32::NAN, 0.0], vec![1.0; 2]).contains("NaN"));
        for factor in [0.0, -1.0, f32::INFINITY, f32::NAN, 1e-39] {
            assert!(refused(vec![0.0; 2], vec![1.0, factor]).contains("factor"), "{factor}");
        }
    }
}
