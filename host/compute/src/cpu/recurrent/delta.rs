//! Gated delta nets.
//!
//! Every value head has a matrix `S` of `k_dim` rows and `v_dim` columns. A row of the batch lets it fade, corrects what it
//! answers to the row's key, and asks it the row's query (arXiv 2412.06464):
//!
//! ```text
//! S ← e^g S      δ = β (v - Sᵀk)      S ← S + k δᵀ      o = scale Sᵀq
//! ```
//!
//! Columns of `S` have nothing to do with each other. Short runs walk row by row over blocks of [`GRAIN`] columns, which stay
//! in the nearest cache and are the units that workers share. Long runs take whole heads and many rows at a time (see
//! [`chunk`](super::chunk)).

use std::ops::Range;

use super::Planes;
use super::chunk::{CHUNK, ChunkScratch, SHORTEST_CHUNK, chunk};
use super::product::GRAIN;
use crate::cpu::pool::Worker;
use crate::cpu::simd::{Isa, Lanes, Level, Portable};
use crate::cpu::vecmath;
use crate::graph::HeadMap;
use crate::plan::StateRun;

/// Heads of a gated delta net and their sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Key and query heads.
    pub k_heads: usize,
    /// Value heads; a multiple of the key heads.
    pub v_heads: usize,
    /// Width of a key or query head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Which key head a value head reads.
    pub map: HeadMap,
}

/// What a gated delta net works on: a row a token.
pub struct DeltaNet<'a> {
    /// Heads.
    pub shape: DeltaShape,
    /// Normalised queries, `k_heads * k_dim` a row.
    pub q: &'a [f32],
    /// Normalised keys, as wide.
    pub k: &'a [f32],
    /// Values, `v_heads * v_dim` a row.
    pub v: &'a [f32],
    /// `g`, at most zero, `v_heads` a row.
    pub decay: &'a [f32],
    /// `β`, `v_heads` a row.
    pub beta: &'a [f32],
    /// Factor of the result.
    pub scale: f32,
    /// The result, as wide as the values, shared by the workers.
    pub out: *mut f32,
}

/// Memory that a worker keeps between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    state: Vec<f32>,
    chunk: ChunkScratch,
}

/// This worker's part of a gated delta net over the runs of a step.
///
/// # Safety
/// The planes are valid and named as a checked step names them; `out` has a row for each of `v`, and only the workers of
/// this call touch it and the planes that the runs write.
pub unsafe fn delta_net(
    isa: Isa,
    worker: Worker<'_>,
    runs: &[StateRun],
    planes: Planes<'_>,
    net: &DeltaNet<'_>,
    scratch: &mut Scratch,
) {
    let blocks = net.shape.v_dim.div_ceil(GRAIN);
    let mine = worker.share(runs.iter().map(|run| run.rows.len() * net.shape.v_heads * blocks).sum(), 1);
    let mut before = 0;
    for run in runs {
        // What one unit costs, in rows of a block; the unit belongs to the worker in whose share it begins.
        let (columns, cost) = match run.rows.len() {
            rows @ ..SHORTEST_CHUNK => (GRAIN, rows),
            rows => (net.shape.v_dim, rows * blocks),
        };
        let per_head = net.shape.v_dim.div_ceil(columns);
        let units = per_head * net.shape.v_heads;
        let first = |share: usize| share.saturating_sub(before).div_ceil(cost.max(1)).min(units);
        for unit in first(mine.start)..first(mine.end) {
            let start = unit % per_head * columns;
            let part = Part {
                isa,
                net,
                run,
                head: unit / per_head,
                columns: start..(start + columns).min(net.shape.v_dim),
                width: columns.next_multiple_of(GRAIN),
            };
            // SAFETY: the caller's promises; no other worker has this unit's columns.
            unsafe { part.work(planes, scratch) };
        }
        before += units * cost;
    }
}

/// Some columns of one head in one run.
pub(super) struct Part<'a> {
    pub(super) isa: Isa,
    pub(super) net: &'a DeltaNet<'a>,
    run: &'a StateRun,
    head: usize,
    columns: Range<usize>,
    /// Elements between rows of the state in scratch; those beyond the columns are zero.
    pub(super) width: usize,
}

impl Part<'_> {
    /// # Safety
    /// See [`delta_net`].
    unsafe fn work(&self, planes: Planes<'_>, scratch: &mut Scratch) {
        let Scratch { state, chunk } = scratch;
        // SAFETY: the caller's promises.
        unsafe {
            self.load(planes, state);
            let mut seen = 0;
            for write in &self.run.to {
                self.advance(seen..write.after as usize, state, chunk);
                self.store(planes, write.plane, state);
                seen = write.after as usize;
            }
            self.advance(seen..self.run.rows.len(), state, chunk);
        }
    }

    /// Words of row `i` of the state in a plane.
    fn words(&self, i: usize) -> Range<usize> {
        let DeltaShape { k_dim, v_dim, .. } = self.net.shape;
        let row = (self.head * k_dim + i) * v_dim;
        row + self.columns.start..row + self.columns.end
    }

    unsafe fn load(&self, planes: Planes<'_>, state: &mut Vec<f32>) {
        state.clear();
        state.resize(self.net.shape.k_dim * self.width, 0.0);
        let Some(plane) = self.run.from else { return };
        for (i, row) in state.chunks_exact_mut(self.width).enumerate() {
            // SAFETY: nobody writes a plane that a run begins with.
            row[..self.columns.len()].copy_from_slice(unsafe { planes.read(plane, self.words(i)) });
        }
    }

    unsafe fn store(&self, planes: Planes<'_>, plane: u32, state: &[f32]) {
        for (i, row) in state.chunks_exact(self.width).enumerate() {
            // SAFETY: nobody else has these columns of the plane.
            unsafe { planes.write(plane, self.words(i)) }.copy_from_slice(&row[..self.columns.len()]);
        }
    }

    /// Takes `rows` of the run in.
    unsafe fn advance(&self, rows: Range<usize>, state: &mut [f32], scratch: &mut ChunkScratch) {
        let first = self.run.rows.start as usize;
        let rows = first + rows.start..first + rows.end;
        // SAFETY: the caller's promises.
        unsafe {
            if rows.len() < SHORTEST_CHUNK {
                rows.for_each(|row| self.row(row, state));
            } else {
                let chunks = rows.clone().step_by(CHUNK).map(|at| at..(at + CHUNK).min(rows.end));
                chunks.for_each(|rows| chunk(self, rows, state, scratch));
            }
        }
    }

    /// Where the head's part of a row of queries or keys begins.
    pub(super) fn key_offset(&self, row: usize) -> usize {
        let DeltaShape { k_heads, v_heads, k_dim, map, .. } = self.net.shape;
        let head = match map {
            HeadMap::Grouped => self.head / (v_heads / k_heads),
            HeadMap::Tiled => self.head % k_heads,
        };
        (row * k_heads + head) * k_dim
    }

    /// The head's part of a row of queries or keys.
    pub(super) fn key_head<'b>(&self, x: &'b [f32], row: usize) -> &'b [f32] {
        let at = self.key_offset(row);
        &x[at..at + self.net.shape.k_dim]
    }

    /// Where this part's values of a row lie, in the values and in the result.
    pub(super) fn value_columns(&self, row: usize) -> Range<usize> {
        let DeltaShape { v_heads, v_dim, .. } = self.net.shape;
        let at = (row * v_heads + self.head) * v_dim;
        at + self.columns.start..at + self.columns.end
    }

    /// The head's element of a row of decays or betas.
    pub(super) fn gate(&self, x: &[f32], row: usize) -> f32 {
        x[row * self.net.shape.v_heads + self.head]
    }

    /// This part's columns of a row of the result.
    ///
    /// # Safety
    /// See [`delta_net`].
    #[allow(clippy::mut_from_ref, reason = "columns of the result belong to one part each")]
    pub(super) unsafe fn out(&self, row: usize) -> &mut [f32] {
        let columns = self.value_columns(row);
        // SAFETY: `out` is as large as the values; nobody else touches these columns.
        unsafe { std::slice::from_raw_parts_mut(self.net.out.add(columns.start), columns.len()) }
    }

    unsafe fn row(&self, row: usize, state: &mut [f32]) {
        let (q, k) = (self.key_head(self.net.q, row), self.key_head(self.net.k, row));
        let gates = Gates {
            fade: vecmath::exp(self.gate(self.net.decay, row)),
            beta: self.gate(self.net.beta, row),
            scale: self.net.scale,
        };
        let values = &self.net.v[self.value_columns(row)];
        // SAFETY: the caller's promise.
        let out = unsafe { self.out(row) };
        for (b, (values, out)) in values.chunks(GRAIN).zip(out.chunks_mut(GRAIN)).enumerate() {
            let mut v = [0.0; GRAIN];
            v[..values.len()].copy_from_slice(values);
            block_row(self.isa, &mut state[b * GRAIN..], self.width, (q, k), gates, &mut v);
            out.copy_from_slice(&v[..values.len()]);
        }
    }
}

/// The scalars of one row and head.
#[derive(Clone, Copy)]
struct Gates {
    /// `e^g`.
    fade: f32,
    beta: f32,
    scale: f32,
}

/// One row in [`GRAIN`] columns of a state whose rows are `width` apart; `v` holds the values, and then the result.
fn block_row(isa: Isa, state: &mut [f32], width: usize, qk: (&[f32], &[f32]), gates: Gates, v: &mut [f32; GRAIN]) {
    assert!(qk.0.len() == qk.1.len() && state.len() + width >= qk.0.len() * width + GRAIN);
    let state = state.as_mut_ptr();
    // SAFETY: the state has `GRAIN` columns of as many rows as the key has elements, as was just checked; `isa` proves the
    // instruction set.
    unsafe {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => block_row_avx512(state, width, qk, gates, v),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni => block_row_avx2(state, width, qk, gates, v),
            _ => block_row_of::<Portable, 4, 1>(state, width, qk, gates, v),
        }
    }
}

/// # Safety
/// See [`block_row_of`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn block_row_avx512(state: *mut f32, width: usize, qk: (&[f32], &[f32]), gates: Gates, v: &mut [f32; GRAIN]) {
    // SAFETY: the caller's promises.
    unsafe { block_row_of::<crate::cpu::simd::F32x16, 2, 4>(state, width, qk, gates, v) }
}

/// # Safety
/// See [`block_row_of`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn block_row_avx2(state: *mut f32, width: usize, qk: (&[f32], &[f32]), gates: Gates, v: &mut [f32; GRAIN]) {
    // SAFETY: the caller's promises.
    unsafe { block_row_of::<crate::cpu::simd::F32x8, 4, 2>(state, width, qk, gates, v) }
}

/// `V` vectors make a block; `U` rows of the state are summed side by side.
///
/// # Safety
/// `state` has [`GRAIN`] columns of `qk.1.len()` rows, `width` apart, and the processor has the instruction set of `S`.
#[inline(always)]
unsafe fn block_row_of<S: Lanes, const V: usize, const U: usize>(
    state: *mut f32,
    width: usize,
    (q, k): (&[f32], &[f32]),
    gates: Gates,
    v: &mut [f32; GRAIN],
) {
    // SAFETY: the caller's promises.
    unsafe {
        let known = column_sums::<S, V, U>(state, width, k);
        let (beta, forgotten) = (S::splat(gates.beta), S::splat(-gates.beta * gates.fade));
        let mut delta = [S::zero(); V];
        for c in 0..V {
            let wanted = S::zero().add_product(S::load(v.as_ptr().add(c * S::N)), beta);
            delta[c] = wanted.add_product(known[c], forgotten);
        }
        let fade = S::splat(gates.fade);
        for (i, k) in k.iter().enumerate() {
            let (row, k) = (state.add(i * width), S::splat(*k));
            for c in 0..V {
                let at = row.add(c * S::N);
                S::zero().add_product(S::load(at), fade).add_product(delta[c], k).store(at);
            }
        }
        let answer = column_sums::<S, V, U>(state, width, q);
        let scale = S::splat(gates.scale);
        for c in 0..V {
            S::zero().add_product(answer[c], scale).store(v.as_mut_ptr().add(c * S::N));
        }
    }
}

/// `stateᵀ x` of one block.
#[inline(always)]
unsafe fn column_sums<S: Lanes, const V: usize, const U: usize>(state: *const f32, width: usize, x: &[f32]) -> [S; V] {
    // SAFETY: the caller's promises.
    unsafe {
        let one = S::splat(1.0);
        let mut sums = [[S::zero(); V]; U];
        for (group, x) in x.chunks(U).enumerate() {
            for (u, x) in x.iter().enumerate() {
                let (row, x) = (state.add((group * U + u) * width), S::splat(*x));
                for c in 0..V {
                    sums[u][c] = sums[u][c].add_product(S::load(row.add(c * S::N)), x);
                }
            }
        }
        let mut total = sums[0];
        for sums in &sums[1..] {
            for c in 0..V {
                total[c] = total[c].add_product(sums[c], one);
            }
        }
        total
    }
}
