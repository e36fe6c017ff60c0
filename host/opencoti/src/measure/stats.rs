//! Numbers that stand for many.

/// The value below which a share `q` (0 to 1) of `values` lies, between neighbours in proportion; NaN of none.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = q.clamp(0.0, 1.0) * last as f64;
    let below = sorted[place.floor() as usize];
    below + (sorted[place.ceil() as usize] - below) * place.fract()
}

/// The middle value; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The mean; NaN of none.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The middle and both ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

impl Spread {
    /// Of some values; all NaN of none.
    pub fn of(values: &[f64]) -> Spread {
        Spread { median: median(values), min: quantile(values, 0.0), max: quantile(values, 1.0) }
    }

    /// As JSON.
    pub fn to_json(self) -> serde_json::Value {
        serde_json::json!({"median": self.median, "min": self.min, "max": self.max})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours_in_proportion() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(median(&values), 2.5);
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 1.0), 4.0);
        assert!((quantile(&values, 0.9) - 3.7).abs() < 1e-12);
        assert_eq!(Spread::of(&[5.0]), Spread { median: 5.0, min: 5.0, max: 5.0 });
        assert!(median(&[]).is_nan());
    }
}
