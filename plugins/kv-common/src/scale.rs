//! Which scale a rotated group stores beside its codes.
//!
//! The codes stand for levels `c` of a group `x`; decoded is `g c`. With `r` the cosine of `x` and `c`:
//!
//! | rule | `g` | relative squared error | mean slope of `<q, g c>` on `<q, x>` |
//! |---|---|---|---|
//! | norm | `\|x\| / \|c\|` | `2 (1 - r)` | `r` |
//! | least squares | `<x, c> / \|c\|^2` | `1 - r^2` | `r^2` |
//! | unbiased | `\|x\|^2 / <x, c>` | `1 / r^2 - 1` | 1 |
//!
//! A slope below 1 makes every logit smaller, as a higher temperature would, and every sum of values shorter; the error of
//! a product is as often above as below and averages out over tokens. (RaBitQ, and DRIVE and EDEN before it, store
//! the unbiased one.)

/// Rule for the scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScaleRule {
    /// Decoded groups have the norm of the original: what public TurboQuant code stores.
    Norm,
    /// Least squared error.
    LeastSquares,
    /// Products with any vector are right in the mean.
    Unbiased,
}

/// What a format's encoder says of the codes that it chose for `y`.
#[derive(Clone, Copy, Debug)]
pub enum Fit {
    /// Levels: `<y, c>` and `|c|^2`.
    Levels {
        /// `<y, c>`.
        product: f32,
        /// `|c|^2`.
        square: f32,
    },
    /// The format fixes the scale, relative to the norm of the group.
    Fixed(f32),
}

impl ScaleRule {
    /// The scale `g` of a group of `n` values with norm `norm`, whose normalised form `y` (of norm `sqrt(n)`) has the given
    /// fit. Decoded values are `g / sqrt(n)` times the levels.
    #[inline(always)]
    pub fn scale(self, fit: Fit, norm: f32, n: usize) -> f32 {
        let n = n as f32;
        match (fit, self) {
            (Fit::Fixed(of_norm), _) => norm * of_norm,
            (Fit::Levels { product, square }, ScaleRule::LeastSquares) => norm * (product / square),
            (Fit::Levels { product, .. }, ScaleRule::Unbiased) if product > 0.0 => norm * (n / product),
            (Fit::Levels { square, .. }, _) => norm * (n / square).sqrt(),
        }
    }
}
