//! The bit-shift trellis of 64 states: codebooks, Viterbi encoding, decoding at any place.
//!
//! The state is the last six bits of the codes so far. A code of `K` bits, chosen in state `s`, selects entry
//! `w = code << 6 | s` of the codebook (the *window*), and leads to state `w >> K`. So a sequence is a stream of bits, lowest
//! first: six bits of initial state and then the codes, and window `t` is the `6 + K` bits from bit `K t` on: any value can
//! be decoded alone. The form is QTIP's (arXiv 2406.11235); the codebooks are our own, trained on normal values with a
//! free initial state by turns of Viterbi encoding and centroids.

use opencoti_kv_common::lanes::Lanes;
use opencoti_kv_common::rotation::MAX_GROUP;

/// Number of states.
const STATES: usize = 64;
/// Steps of an entry in 1.
const UNITS: f32 = 8192.0;
/// Bits of a state.
const STATE_BITS: usize = 6;

/// A codebook for codes of `K` bits, `L = 2^K` of them, with `N = 64 L` entries and `P = N L` pairs of neighbouring ones.
pub(crate) struct Codebook<const K: usize, const L: usize, const N: usize, const P: usize> {
    /// Entries by window.
    entries: [f32; N],
    /// The same in the order of [`Codebook::forward`]: by the lower bits of the next state, the bits dropped, the code.
    ordered: [f32; N],
    /// Two values at once, by the `6 + 2 K` bits of both windows: the first in the lower half, in units of 2^-13.
    pairs: [u32; P],
}

/// A sequence as the encoder found it.
pub(crate) struct Path {
    /// Windows, of which the first `n` count.
    windows: [u16; MAX_GROUP],
    /// The state it starts in.
    pub(crate) state: u8,
    /// Squared error.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compare it with the error of what is stored"))]
    pub(crate) cost: f32,
}

/// Least costs of all states, ordered like a step of [`Codebook::forward`] writes them.
type Costs = [f32; STATES];

/// One hexadecimal digit.
const fn digit(c: u8) -> u16 {
    (match c {
        b'0'..=b'9' => c - b'0',
        _ => c - b'a' + 10,
    }) as u16
}

impl<const K: usize, const L: usize, const N: usize, const P: usize> Codebook<K, L, N, P> {
    /// States that lead to one another's codes: `2^(6 - K)`.
    const BRANCHES: usize = STATES / L;

    /// From signed 16-bit values in hexadecimal digits, in units of 2^-13; line ends are passed over.
    pub(crate) const fn parse(hex: &[u8]) -> Self {
        let (mut entries, mut ordered, mut words) = ([0.0; N], [0.0; N], [0; N]);
        let (mut at, mut w) = (0, 0);
        while w < N {
            let (mut value, mut digits) = (0u16, 0);
            while digits < 4 {
                if hex[at] != b'\n' {
                    value = value << 4 | digit(hex[at]);
                    digits += 1;
                }
                at += 1;
            }
            words[w] = value as u32;
            entries[w] = value.cast_signed() as f32 / UNITS;
            let (code, low, dropped) = (w / STATES, w % STATES / L, w % L);
            ordered[(low * L + dropped) * L + code] = entries[w];
            w += 1;
        }
        let (mut pairs, mut bits) = ([0; P], 0);
        while bits < P {
            pairs[bits] = words[bits % N] | words[bits >> K] << 16;
            bits += 1;
        }
        Codebook { entries, ordered, pairs }
    }

    /// Bytes of the stream of `n` codes, an even number.
    pub(crate) const fn stream_bytes(n: usize) -> usize {
        (STATE_BITS + K * n).div_ceil(16) * 2
    }

    /// Where [`Codebook::forward`] puts the cost of a state: `2^(6 - K)` rows by its lower bits, in a row by its code.
    #[inline(always)]
    const fn place(state: usize) -> usize {
        state % Self::BRANCHES * L + state / Self::BRANCHES
    }

    /// Costs after one more value `y`. Of the `L` windows that lead to a state, the one of least cost counts.
    #[inline(always)]
    fn forward(&self, y: f32, from: &Costs, to: &mut Costs) {
        let rows = self.ordered.as_chunks::<L>().0;
        for low in 0..Self::BRANCHES {
            let mut best = [f32::INFINITY; L];
            for dropped in 0..L {
                // The remainders change nothing, and spare the checks of bounds.
                let state = (low * L + dropped) % STATES;
                let (cost, entries) = (from[Self::place(state) % STATES], &rows[state]);
                for code in 0..L {
                    let error = y - entries[code];
                    let candidate = cost + error * error;
                    best[code] = if candidate < best[code] { candidate } else { best[code] };
                }
            }
            to[low * L..][..L].copy_from_slice(&best);
        }
    }

    /// The sequence of least squared error to `y`, from any state. Ties go to the lowest state and window.
    ///
    /// Products and sums are rounded one by one, so that every processor finds the same sequence.
    #[inline(always)]
    #[expect(clippy::large_stack_arrays, reason = "33 KiB are little of a worker's stack, and nothing is allocated")]
    pub(crate) fn encode(&self, y: &[f32]) -> Path {
        assert!(y.len() <= MAX_GROUP);
        let mut costs = [[0.0; STATES]; MAX_GROUP + 1];
        for (t, &y) in y.iter().enumerate() {
            let (before, after) = costs.split_at_mut(t + 1);
            self.forward(y, &before[t], &mut after[0]);
        }
        let last = &costs[y.len()];
        let mut state = 0;
        for s in 1..STATES {
            if last[Self::place(s)] < last[Self::place(state)] {
                state = s;
            }
        }
        let cost = last[Self::place(state)];
        let mut windows = [0; MAX_GROUP];
        for (t, &y) in y.iter().enumerate().rev() {
            let window = self.best_into(state, y, &costs[t]);
            windows[t] = window as u16;
            state = window % STATES;
        }
        Path { windows, state: state as u8, cost }
    }

    /// The window of least cost into `state`: the same arithmetic as in [`Codebook::forward`].
    #[inline(always)]
    fn best_into(&self, state: usize, y: f32, from: &Costs) -> usize {
        let first = state << K;
        let (mut best, mut best_cost) = (first, f32::INFINITY);
        for window in first..first + L {
            let error = y - self.entries[window];
            let candidate = from[Self::place(window % STATES)] + error * error;
            if candidate < best_cost {
                (best, best_cost) = (window, candidate);
            }
        }
        best
    }

    /// The level of a path's value `t`.
    #[inline(always)]
    pub(crate) fn level(&self, path: &Path, t: usize) -> f32 {
        self.entries[usize::from(path.windows[t])]
    }

    /// Writes a path of `n` values as a stream.
    #[inline(always)]
    pub(crate) fn write(path: &Path, n: usize, stream: &mut [u8]) {
        let (mut bits, mut filled, mut at) = (u32::from(path.state), STATE_BITS, 0);
        for window in &path.windows[..n] {
            bits |= u32::from(window >> STATE_BITS) << filled;
            filled += K;
            while filled >= 8 {
                stream[at] = bits as u8;
                (bits, filled, at) = (bits >> 8, filled - 8, at + 1);
            }
        }
        stream[at..].fill(0);
        if filled > 0 {
            stream[at] = bits as u8;
        }
    }

    /// Levels times `scale` of a stream of `out.len()` values, a multiple of 8.
    ///
    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    pub(crate) unsafe fn read<I: Lanes>(&self, stream: &[u8], scale: f32, out: &mut [f32]) {
        let step = scale / UNITS;
        // Eight codes are a whole number of bytes, and eight windows lie within four.
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let bytes = &stream[K * i..][..4];
            let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let pair = |p: usize| self.pairs[(word >> (2 * K * p)) as usize % P];
            // SAFETY: features by the caller.
            unsafe { I::put_pairs([pair(0), pair(1), pair(2), pair(3)], step, out) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BOOK_2, BOOK_3};
    use opencoti_kv_common::isa::Portable;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn values(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
        (0..n).map(|_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0).collect()
    }

    /// Squared error of the sequence that starts in `state` and goes on with `codes`.
    fn error<const K: usize, const L: usize, const N: usize, const P: usize>(
        book: &Codebook<K, L, N, P>,
        mut state: usize,
        codes: impl Iterator<Item = usize>,
        y: &[f32],
    ) -> f32 {
        codes.zip(y).fold(0.0, |sum, (code, y)| {
            let window = code << STATE_BITS | state;
            state = window >> K;
            let error = y - book.entries[window];
            sum + error * error
        })
    }

    fn check<const K: usize, const L: usize, const N: usize, const P: usize>(book: &Codebook<K, L, N, P>, seed: u64) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for n in [64, 96, 128] {
            let y = values(&mut rng, n);
            let path = book.encode(&y);
            let mut stream = vec![0xff; Codebook::<K, L, N, P>::stream_bytes(n)];
            Codebook::<K, L, N, P>::write(&path, n, &mut stream);

            let bit = |i: usize| usize::from(stream[i / 8] >> (i % 8) & 1);
            let field = |at: usize, bits: usize| (0..bits).fold(0, |f, i| f | bit(at + i) << i);
            assert_eq!(field(0, STATE_BITS), usize::from(path.state));
            for t in 0..n {
                assert_eq!(field(K * t, STATE_BITS + K), usize::from(path.windows[t]), "window {t}");
            }
            let codes = (0..n).map(|t| field(STATE_BITS + K * t, K));
            assert_eq!(error(book, usize::from(path.state), codes, &y), path.cost, "the bytes have the path's cost");

            let mut read = vec![0.0; n];
            // SAFETY: needs no features.
            unsafe { book.read::<Portable>(&stream, 2.0, &mut read) };
            assert!((0..n).all(|t| read[t] == 2.0 * book.level(&path, t)));

            for _ in 0..2000 {
                let state = rng.random_range(0..STATES);
                let codes: Vec<usize> = (0..n).map(|_| rng.random_range(0..L)).collect();
                assert!(error(book, state, codes.into_iter(), &y) >= path.cost, "a random path is better");
            }
        }
    }

    #[test]
    fn streams_hold_the_windows_of_a_path_that_no_random_one_beats() {
        check(&BOOK_2, 1);
        check(&BOOK_3, 2);
    }

    #[test]
    fn the_codebooks_are_the_published_ones() {
        use sha2::{Digest, Sha256};
        let hash = |entries: &[f32]| {
            let words = entries.iter().flat_map(|e| ((e * 8192.0) as i16).to_le_bytes());
            Sha256::digest(words.collect::<Vec<u8>>()).iter().map(|b| format!("{b:02x}")).collect::<String>()
        };
        assert_eq!(hash(&BOOK_2.entries), "5d138a657c1654d4d0e274ea6b5658ee146c79dc01f8aab61165903de59b49ad");
        assert_eq!(hash(&BOOK_3.entries), "c3e257c8bcb0c15cb00d0e7f6374a9ec81bfd971b458180163987834eeecb3b7");
    }

    #[test]
    fn a_short_sequence_costs_what_a_search_of_all_finds() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for _ in 0..20 {
            let y = values(&mut rng, 4);
            let best = (0..STATES)
                .flat_map(|state| (0..256usize).map(move |codes| (state, codes)))
                .map(|(state, codes)| error(&BOOK_2, state, (0..4).map(|t| codes >> (2 * t) & 3), &y))
                .fold(f32::INFINITY, f32::min);
            assert_eq!(BOOK_2.encode(&y).cost, best);
        }
    }
}
