//! Packed weights: which parts a block of each type has, and how it gets from the file's layout into the packed one.
//!
//! A packed matrix is cut into groups of eight or sixteen rows, one row a lane of a vector. Blocks of a group lie one after
//! the other; in each, what belongs together for all rows is one vector, so that a kernel multiplies a whole group with one
//! activation row and never sums across lanes. A block holds, for every row:
//!
//! 1. the factor `d` and, in some formats, `dmin`, both half-precision;
//! 2. for each run of 32 columns: small whole-number scales and minima, if the format has them, then the codes.
//!
//! Codes lie so that one shift and one mask bring forth two neighbouring columns of each row as 16-bit words ([`put_codes`]).

use crate::quant::WeightType;
use crate::quant::k::{q3_scale, scale_min};

/// How codes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// Four bits.
    Nibble,
    /// Five bits: a nibble and a plane of fifth bits.
    Fifth,
    /// Six bits: a nibble and a plane of upper pairs.
    Sixth,
    /// A signed byte.
    Byte,
    /// A nibble that names an entry of [`IQ4_LEVELS`].
    Table,
}

/// Entries of the non-linear four-bit types, 127 added so that none is negative and the first is zero.
pub(super) const IQ4_LEVELS: [u8; 16] = {
    let mut levels = [0; 16];
    let mut i = 0;
    while i < 16 {
        levels[i] = (crate::quant::iq::IQ4_LEVELS[i] as i16 + 127) as u8;
        i += 1;
    }
    levels
};

/// How the columns of a block are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// By `d` alone; a block has 32 columns.
    Plain,
    /// By `d` and a byte without sign for each `sub` columns; a block has 256.
    Unsigned { sub: usize },
    /// By `d` and a signed byte for each `sub` columns; a block has 256.
    Signed { sub: usize },
}

/// What is added to scaled codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Minima {
    /// Nothing.
    None,
    /// This is taken from each code before it is scaled.
    Offset(u8),
    /// `dmin`.
    Plain,
    /// Less `dmin` and a byte without sign for each `sub` columns.
    Unsigned,
}

/// A packed format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) codes: Codes,
    pub(super) scales: Scales,
    pub(super) minima: Minima,
}

impl Format {
    /// Columns of a block.
    pub(super) const fn cols(self) -> usize {
        if matches!(self.scales, Scales::Plain) { 32 } else { 256 }
    }

    /// Columns with a common scale.
    pub(super) const fn sub(self) -> usize {
        match self.scales {
            Scales::Plain => 32,
            Scales::Unsigned { sub } | Scales::Signed { sub } => sub,
        }
    }

    /// Bytes of a row's `d` and `dmin`.
    pub(super) const fn head_bytes(self) -> usize {
        if matches!(self.minima, Minima::Plain | Minima::Unsigned) { 4 } else { 2 }
    }

    /// Bytes of a row's small scales in a run of 32 columns, the same again for minima.
    pub(super) const fn scale_bytes(self) -> usize {
        if matches!(self.scales, Scales::Plain) { 0 } else { 32 / self.sub() }
    }

    /// Bytes of a row's scales and minima in a run of 32 columns.
    pub(super) const fn side_bytes(self) -> usize {
        if matches!(self.minima, Minima::Unsigned) { 2 * self.scale_bytes() } else { self.scale_bytes() }
    }

    /// Bytes of a row's codes in a run of 32 columns.
    pub(super) const fn code_bytes(self) -> usize {
        match self.codes {
            Codes::Nibble | Codes::Table => 16,
            Codes::Fifth => 20,
            Codes::Sixth => 24,
            Codes::Byte => 32,
        }
    }

    /// Bytes of a row in a run of 32 columns.
    pub(super) const fn run_bytes(self) -> usize {
        self.side_bytes() + self.code_bytes()
    }

    /// Bytes of a row in a block.
    pub(super) const fn block_bytes(self) -> usize {
        self.head_bytes() + self.cols() / 32 * self.run_bytes()
    }
}

/// A type whose kernels know its format when they are compiled.
pub(super) trait Scheme {
    /// The format.
    const FORMAT: Format;
}

macro_rules! schemes {
    ($($name:ident: $codes:ident, $scales:expr, $minima:expr;)+) => {
        $(
            #[allow(non_camel_case_types, reason = "the names of the weight types")]
            pub(super) struct $name;

            impl Scheme for $name {
                const FORMAT: Format = Format { codes: Codes::$codes, scales: $scales, minima: $minima };
            }
        )+

        /// The packed format of a type, `None` for those that are multiplied in f32.
        pub(super) fn format(ty: WeightType) -> Option<Format> {
            match ty {
                $(WeightType::$name => Some($name::FORMAT),)+
                _ => None,
            }
        }

        /// Evaluates an expression with the scheme of a type, which must have one.
        macro_rules! with_scheme {
            ($ty:expr, $scheme:ident => $body:expr) => {
                match $ty {
                    $(
                        crate::quant::WeightType::$name => {
                            type $scheme = crate::matmul::format::$name;
                            $body
                        }
                    )+
                    ty => unreachable!("{ty} has no packed format"),
                }
            };
        }
        pub(super) use with_scheme;
    };
}

schemes! {
    Q4_0: Nibble, Scales::Plain, Minima::Offset(8);
    Q4_1: Nibble, Scales::Plain, Minima::Plain;
    Q5_0: Fifth, Scales::Plain, Minima::Offset(16);
    Q5_1: Fifth, Scales::Plain, Minima::Plain;
    Q8_0: Byte, Scales::Plain, Minima::None;
    Q2_K: Nibble, Scales::Unsigned { sub: 16 }, Minima::Unsigned;
    Q3_K: Nibble, Scales::Signed { sub: 16 }, Minima::Offset(4);
    Q4_K: Nibble, Scales::Unsigned { sub: 32 }, Minima::Unsigned;
    Q5_K: Fifth, Scales::Unsigned { sub: 32 }, Minima::Unsigned;
    Q6_K: Sixth, Scales::Signed { sub: 16 }, Minima::Offset(32);
    IQ4_NL: Table, Scales::Plain, Minima::Offset(127);
    IQ4_XS: Table, Scales::Signed { sub: 32 }, Minima::Offset(127);
}

/// A block as the file has it, taken apart.
pub(super) struct Parts {
    /// `d` and `dmin`, little-endian halves.
    pub(super) head: [u8; 4],
    /// Small scales.
    pub(super) scales: [u8; 16],
    /// Small minima.
    pub(super) minima: [u8; 16],
    /// Codes, in the order of the columns.
    pub(super) codes: [u8; 256],
}

impl Parts {
    pub(super) const EMPTY: Parts = Parts { head: [0; 4], scales: [0; 16], minima: [0; 16], codes: [0; 256] };

    fn head(&mut self, b: &[u8], d: usize, dmin: usize) {
        self.head = [b[d], b[d + 1], b[dmin], b[dmin + 1]];
    }

    /// Takes apart one block of a type that has a packed format.
    #[inline(always)]
    pub(super) fn read(&mut self, ty: WeightType, b: &[u8]) {
        match ty {
            WeightType::Q4_0 | WeightType::IQ4_NL => {
                self.head(b, 0, 0);
                nibbles(&b[2..18], &mut self.codes[..32]);
            }
            WeightType::Q4_1 => {
                self.head(b, 0, 2);
                nibbles(&b[4..20], &mut self.codes[..32]);
            }
            WeightType::Q5_0 => {
                self.head(b, 0, 0);
                nibbles(&b[6..22], &mut self.codes[..32]);
                fifth_bits(&b[2..6], &mut self.codes[..32]);
            }
            WeightType::Q5_1 => {
                self.head(b, 0, 2);
                nibbles(&b[8..24], &mut self.codes[..32]);
                fifth_bits(&b[4..8], &mut self.codes[..32]);
            }
            WeightType::Q8_0 => {
                self.head(b, 0, 0);
                self.codes[..32].copy_from_slice(&b[2..34]);
            }
            WeightType::Q2_K => self.q2_k(b),
            WeightType::Q3_K => self.q3_k(b),
            WeightType::Q4_K => self.q45_k(b, &b[16..144], None),
            WeightType::Q5_K => self.q45_k(b, &b[48..176], Some(&b[16..48])),
            WeightType::Q6_K => self.q6_k(b),
            WeightType::IQ4_XS => self.iq4_xs(b),
            _ => unreachable!("{ty} has no packed format"),
        }
    }

    fn q2_k(&mut self, b: &[u8]) {
        self.head(b, 80, 82);
        for n in 0..16 {
            (self.scales[n], self.minima[n]) = (b[n] & 15, b[n] >> 4);
        }
        for (half, codes) in self.codes.chunks_exact_mut(128).enumerate() {
            let packed = &b[16 + half * 32..][..32];
            for (pair, codes) in codes.chunks_exact_mut(32).enumerate() {
                codes.iter_mut().zip(packed).for_each(|(code, p)| *code = p >> (2 * pair) & 3);
            }
        }
    }

    fn q3_k(&mut self, b: &[u8]) {
        self.head(b, 108, 108);
        for n in 0..16 {
            self.scales[n] = q3_scale(&b[96..108], n).cast_unsigned();
        }
        for (half, codes) in self.codes.chunks_exact_mut(128).enumerate() {
            let packed = &b[32 + half * 32..][..32];
            for (pair, codes) in codes.chunks_exact_mut(32).enumerate() {
                for ((code, p), third) in codes.iter_mut().zip(packed).zip(&b[..32]) {
                    *code = p >> (2 * pair) & 3 | (third >> (4 * half + pair) & 1) << 2;
                }
            }
        }
    }

    /// Q4_K, and Q5_K with its fifth bits.
    fn q45_k(&mut self, b: &[u8], packed: &[u8], fifth: Option<&[u8]>) {
        self.head(b, 0, 2);
        for n in 0..8 {
            (self.scales[n], self.minima[n]) = scale_min(&b[4..16], n);
        }
        for (run, codes) in self.codes.chunks_exact_mut(64).enumerate() {
            let (low, high) = codes.split_at_mut(32);
            for (i, p) in packed[run * 32..][..32].iter().enumerate() {
                (low[i], high[i]) = (p & 15, p >> 4);
            }
            for (i, bits) in fifth.into_iter().flatten().enumerate() {
                low[i] |= (bits >> (2 * run) & 1) << 4;
                high[i] |= (bits >> (2 * run + 1) & 1) << 4;
            }
        }
    }

    fn q6_k(&mut self, b: &[u8]) {
        self.head(b, 208, 208);
        self.scales.copy_from_slice(&b[192..208]);
        for (half, codes) in self.codes.chunks_exact_mut(128).enumerate() {
            // A byte of low nibbles belongs to two columns 64 apart, a byte of upper pairs to four 32 apart.
            let (low, high) = (&b[half * 64..][..64], &b[128 + half * 32..][..32]);
            for i in 0..32 {
                codes[i] = low[i] & 15 | (high[i] & 3) << 4;
                codes[i + 32] = low[i + 32] & 15 | (high[i] >> 2 & 3) << 4;
                codes[i + 64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
                codes[i + 96] = low[i + 32] >> 4 | high[i] >> 6 << 4;
            }
        }
    }

    fn iq4_xs(&mut self, b: &[u8]) {
        self.head(b, 0, 0);
        let upper = u16::from_le_bytes([b[2], b[3]]);
        for g in 0..8 {
            let low = b[4 + g / 2] >> (g % 2 * 4) & 15;
            self.scales[g] = (low | ((upper >> (2 * g) & 3) as u8) << 4).wrapping_sub(32);
            nibbles(&b[8 + g * 16..][..16], &mut self.codes[g * 32..][..32]);
        }
    }
}

/// Sixteen bytes of nibbles: the low ones, then the high ones.
fn nibbles(packed: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for (i, p) in packed.iter().enumerate() {
        (low[i], high[i]) = (p & 15, p >> 4);
    }
}

/// A mask of 32 fifth bits.
fn fifth_bits(mask: &[u8], codes: &mut [u8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (mask[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// Writes the codes of 32 columns of row `lane` among the `lanes` rows of a group; `to` begins at the group's codes.
///
/// Columns go in pairs, one in each half of the row's 32 bits of a vector. A vector of nibbles holds four pairs from the
/// lowest bits on, a vector of bytes two; the planes of Q5 and Q6 hold sixteen and eight.
#[inline(always)]
pub(super) fn put_codes(codes: &[u8; 32], form: Codes, to: &mut [u8], lane: usize, lanes: usize) {
    let mut put = |vector: usize, word: u32| {
        to[(vector * lanes + lane) * 4..][..4].copy_from_slice(&word.to_le_bytes());
    };
    // Field `k` of either half, `width` bits wide, holds what `part` takes of the pair's two codes.
    let gather = |first: usize, n: usize, width: usize, part: fn(u8) -> u32| {
        (0..n).fold(0, |word, k| {
            let (a, b) = (part(codes[first + 2 * k]), part(codes[first + 2 * k + 1]));
            word | a << (width * k) | b << (width * k + 16)
        })
    };
    match form {
        Codes::Byte => (0..8).for_each(|v| put(v, gather(4 * v, 2, 8, |code| code.into()))),
        _ => (0..4).for_each(|v| put(v, gather(8 * v, 4, 4, |code| (code & 15).into()))),
    }
    match form {
        Codes::Fifth => put(4, gather(0, 16, 1, |code| (code >> 4).into())),
        Codes::Sixth => (0..2).for_each(|v| put(4 + v, gather(16 * v, 8, 2, |code| (code >> 4).into()))),
        _ => {}
    }
}
