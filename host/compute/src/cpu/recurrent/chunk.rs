//! Many rows of a gated delta net at once, by products of matrices.
//!
//! With `G` the running sum of `g` in a chunk, and `D[t][s] = e^(G_t - G_s)` for rows `s` up to `t`:
//!
//! ```text
//! (1 + A) N = β (V - e^G K S)      A = β (K Kᵀ ⊙ D), below the diagonal
//! O = scale (e^G Q S + P N)        P = Q Kᵀ ⊙ D, up to the diagonal
//! S ← e^(G_last) S + (e^(G_last - G) K)ᵀ N
//! ```
//!
//! `N` are the corrections `δ` of all rows. This is the recurrence summed in another order, for any number of rows.

use std::ops::Range;

use super::delta::Part;
use super::product::{GRAIN, Left, product};
use crate::cpu::simd::Isa;
use crate::cpu::vecmath;

/// Most rows that are taken at once.
pub(super) const CHUNK: usize = 64;
/// Fewer rows are walked one by one.
pub(super) const SHORTEST_CHUNK: usize = 16;
/// Rows of a chunk whose corrections are solved together.
const SOLVED_TOGETHER: usize = 8;

/// Memory that a worker keeps between chunks.
#[derive(Debug, Default)]
pub(super) struct ChunkScratch {
    /// `Kᵀ`: a row for each element of a key, a column for each row of the chunk.
    keys_transposed: Vec<f32>,
    /// `e^(G_last - G) K`.
    keys_faded: Vec<f32>,
    /// `-A`.
    coupling: Vec<f32>,
    /// `P`.
    mixing: Vec<f32>,
    /// `N`.
    corrections: Vec<f32>,
    out: Vec<f32>,
}

/// A chunk of the rows of a part.
struct Chunk<'a> {
    part: &'a Part<'a>,
    rows: Range<usize>,
    /// `G` of each row.
    faded: [f32; CHUNK],
    /// Elements between rows of the square matrices.
    across: usize,
}

/// Takes `rows` of the batch, at most [`CHUNK`], into `state`, whose rows are `part.width` apart.
///
/// # Safety
/// Nobody else touches the part's columns of these rows of the result.
pub(super) unsafe fn chunk(part: &Part<'_>, rows: Range<usize>, state: &mut [f32], scratch: &mut ChunkScratch) {
    let mut faded = [0.0; CHUNK];
    let mut sum = 0.0;
    for (faded, row) in faded.iter_mut().zip(rows.clone()) {
        sum += part.gate(part.net.decay, row);
        *faded = sum;
    }
    let chunk = Chunk { part, across: rows.len().next_multiple_of(GRAIN), rows, faded };
    chunk.arrange_keys(scratch);
    chunk.relate_rows(scratch);
    chunk.correct(state, scratch);
    chunk.answer(state, scratch);
    // SAFETY: the caller's promise.
    unsafe { chunk.put(scratch) };
    let (k_dim, keys) = (part.net.shape.k_dim, &scratch.keys_faded);
    let keys = Left { data: keys, row: 1, col: k_dim };
    product(part.isa, keys, &scratch.corrections, part.width, (k_dim, chunk.len()), vecmath::exp(sum), state);
}

impl Chunk<'_> {
    fn len(&self) -> usize {
        self.rows.len()
    }

    /// The head's queries or keys as a left factor.
    fn left<'b>(&self, x: &'b [f32]) -> Left<'b> {
        let shape = self.part.net.shape;
        Left { data: &x[self.part.key_offset(self.rows.start)..], row: shape.k_heads * shape.k_dim, col: 1 }
    }

    fn arrange_keys(&self, scratch: &mut ChunkScratch) {
        let k_dim = self.part.net.shape.k_dim;
        let transposed = sized(&mut scratch.keys_transposed, k_dim * self.across);
        let faded = sized(&mut scratch.keys_faded, self.len() * k_dim);
        let last = self.faded[self.len() - 1];
        for (t, (row, faded)) in self.rows.clone().zip(faded.chunks_exact_mut(k_dim)).enumerate() {
            let key = self.part.key_head(self.part.net.k, row);
            vecmath::scale(self.part.isa, key, vecmath::exp(last - self.faded[t]), faded);
            for (i, x) in key.iter().enumerate() {
                transposed[i * self.across + t] = *x;
            }
        }
    }

    /// `-A` and `P`.
    fn relate_rows(&self, scratch: &mut ChunkScratch) {
        let (net, isa, across) = (self.part.net, self.part.isa, self.across);
        let size = (self.len(), net.shape.k_dim);
        let coupling = sized(&mut scratch.coupling, self.len() * across);
        let mixing = sized(&mut scratch.mixing, self.len() * across);
        product(isa, self.left(net.k), &scratch.keys_transposed, across, size, 0.0, coupling);
        product(isa, self.left(net.q), &scratch.keys_transposed, across, size, 0.0, mixing);
        let lines = coupling.chunks_exact_mut(across).zip(mixing.chunks_exact_mut(across));
        for ((t, row), (coupling, mixing)) in self.rows.clone().enumerate().zip(lines) {
            let beta = self.part.gate(net.beta, row);
            fade_line(isa, &self.faded[..=t], -beta, &mut coupling[..=t]);
            fade_line(isa, &self.faded[..=t], 1.0, &mut mixing[..=t]);
            mixing[t + 1..].fill(0.0);
        }
    }

    /// `N`: what each row corrects, which depends on what those before it did.
    fn correct(&self, state: &[f32], scratch: &mut ChunkScratch) {
        let (net, isa, width, across) = (self.part.net, self.part.isa, self.part.width, self.across);
        let n = sized(&mut scratch.corrections, self.len() * width);
        product(isa, self.left(net.k), state, width, (self.len(), net.shape.k_dim), 0.0, n);
        for ((t, row), found) in self.rows.clone().enumerate().zip(n.chunks_exact_mut(width)) {
            let (beta, fade) = (self.part.gate(net.beta, row), vecmath::exp(self.faded[t]));
            for (found, wanted) in found.iter_mut().zip(&net.v[self.part.value_columns(row)]) {
                *found = beta * (wanted - fade * *found);
            }
        }
        let coupling = |t: usize, s: usize| Left { data: &scratch.coupling[t * across + s..], row: across, col: 1 };
        for start in (0..self.len()).step_by(SOLVED_TOGETHER) {
            let end = (start + SOLVED_TOGETHER).min(self.len());
            let (before, rest) = n.split_at_mut(start * width);
            product(isa, coupling(start, 0), before, width, (end - start, start), 1.0, rest);
            for t in start + 1..end {
                let (before, rest) = n.split_at_mut(t * width);
                product(isa, coupling(t, start), &before[start * width..], width, (1, t - start), 1.0, rest);
            }
        }
    }

    /// `e^G Q S + P N`.
    fn answer(&self, state: &[f32], scratch: &mut ChunkScratch) {
        let (net, isa, width, across) = (self.part.net, self.part.isa, self.part.width, self.across);
        let out = sized(&mut scratch.out, self.len() * width);
        product(isa, self.left(net.q), state, width, (self.len(), net.shape.k_dim), 0.0, out);
        for (line, faded) in out.chunks_exact_mut(width).zip(self.faded) {
            let fade = vecmath::exp(faded);
            line.iter_mut().for_each(|o| *o *= fade);
        }
        for start in (0..self.len()).step_by(SOLVED_TOGETHER) {
            let end = (start + SOLVED_TOGETHER).min(self.len());
            let mixing = Left { data: &scratch.mixing[start * across..], row: across, col: 1 };
            product(isa, mixing, &scratch.corrections, width, (end - start, end), 1.0, &mut out[start * width..]);
        }
    }

    /// # Safety
    /// See [`chunk`].
    unsafe fn put(&self, scratch: &ChunkScratch) {
        for (line, row) in scratch.out.chunks_exact(self.part.width).zip(self.rows.clone()) {
            // SAFETY: the caller's promise.
            let out = unsafe { self.part.out(row) };
            vecmath::scale(self.part.isa, &line[..out.len()], self.part.net.scale, out);
        }
    }
}

/// `line[s] *= factor * e^(G_t - G_s)`, `t` being the last row.
fn fade_line(isa: Isa, faded: &[f32], factor: f32, line: &mut [f32]) {
    vecmath::scale_by_exp(isa, faded[faded.len() - 1], faded, factor, line);
}

/// The first `len` elements of `v`, which grows if it must; their values are whatever they are.
fn sized(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if v.len() < len {
        v.resize(len, 0.0);
    }
    &mut v[..len]
}
