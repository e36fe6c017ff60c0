//! Many rows: a tile is decoded and multiplied in register blocks with all of them. Queries and scores lie
//! in columns, so that keys need no transposing and the softmax of sixteen rows goes through vectors together.

use std::ops::Range;

use opencoti_plugin_api::PAGE_TOKENS;

use super::super::kernels::{self, Left, Size};
use super::super::softmax::{self, COLUMNS, Columns, Softmax};
use super::super::work::slots;
use super::{Reader, Scratch, codec_failed};
use crate::plan::PageSpan;

impl Reader<'_> {
    /// Partial results of many rows.
    ///
    /// # Safety
    /// As [`Reader::run`]; queries are gathered.
    pub(super) unsafe fn read_for_many(
        &self,
        scratch: &mut Scratch,
        acc: &mut [f32],
        state: &mut [Softmax],
    ) -> Result<(), String> {
        let (n_rows, d) = (state.len(), self.at.geometry.k_head_dim);
        // SAFETY: `q` holds the rows.
        unsafe { self.tiles.k.codec.transform_query(scratch.q.as_mut_ptr(), n_rows, d) }
            .map_err(|e| codec_failed("prepare queries for", &self.tiles.k, &e))?;
        let Scratch { q, columns, .. } = scratch;
        into_columns(&q[..n_rows * d], d, columns);
        for span in self.pages {
            let seen = self.seen(span);
            if seen.is_empty() {
                continue;
            }
            // SAFETY: the page exists and its first `len` slots are written; `seen` is within them.
            unsafe { self.score_columns(span, &seen, scratch, n_rows)? };
            self.weigh_columns(span, &seen, scratch, acc, state);
            // SAFETY: as above.
            unsafe { self.accumulate_columns(span, &seen, scratch, acc)? };
        }
        Ok(())
    }

    /// Scores of all rows over the slots `seen`, in columns.
    ///
    /// # Safety
    /// The slots of the page were written and nobody writes them.
    unsafe fn score_columns(
        &self,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        n_rows: usize,
    ) -> Result<(), String> {
        let d = self.at.geometry.k_head_dim;
        let Scratch { columns, tile, scores, added, .. } = scratch;
        // SAFETY: passed on.
        unsafe { self.decode(&self.tiles.k, span.page, seen.clone(), tile)? };
        let keys = Left { data: tile, row: d, column: 1 };
        let size = Size { m: seen.len(), n: COLUMNS, k: d };
        for group in 0..n_rows.div_ceil(COLUMNS) {
            let queries = &columns[group * d * COLUMNS..][..d * COLUMNS];
            let scores = &mut scores[group * PAGE_TOKENS * COLUMNS..][..seen.len() * COLUMNS];
            let mut start = [0.0; COLUMNS];
            start.iter_mut().zip(&added[group * COLUMNS..n_rows]).for_each(|(start, added)| *start = *added);
            scores.as_chunks_mut().0.fill(start);
            kernels::add_product(self.at.isa, keys, queries, COLUMNS, scores, COLUMNS, size);
        }
        Ok(())
    }

    /// Turns scores into weights, and brings the sums so far to the new maxima.
    fn weigh_columns(
        &self,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        acc: &mut [f32],
        state: &mut [Softmax],
    ) {
        let v_dim = self.at.geometry.v_head_dim;
        for (group, state) in state.chunks_mut(COLUMNS).enumerate() {
            let mut rows = Columns {
                start: [0; COLUMNS],
                end: [0; COLUMNS],
                max: [f32::NEG_INFINITY; COLUMNS],
                sum: [0.0; COLUMNS],
                factor: [1.0; COLUMNS],
            };
            for (i, state) in state.iter().enumerate() {
                let visible = slots(span, &self.visible(self.rows[(group * COLUMNS + i) / self.heads]));
                let within = |slot: usize| (slot.clamp(seen.start, seen.end) - seen.start) as u32;
                (rows.start[i], rows.end[i]) = (within(visible.start), within(visible.end));
                (rows.max[i], rows.sum[i]) = (state.max, state.sum);
            }
            // Columns without a row do as their neighbour: what they hold is not used.
            for i in state.len()..COLUMNS {
                (rows.start[i], rows.end[i]) = (rows.start[i - 1], rows.end[i - 1]);
            }
            let scores = &mut scratch.scores[group * PAGE_TOKENS * COLUMNS..][..seen.len() * COLUMNS];
            softmax::columns(self.at.isa, scores, COLUMNS, self.attend.softcap, &mut rows);
            let acc = acc[group * COLUMNS * v_dim..].chunks_exact_mut(v_dim);
            for ((i, state), acc) in state.iter_mut().enumerate().zip(acc) {
                *state = Softmax { max: rows.max[i], sum: rows.sum[i] };
                if rows.factor[i] != 1.0 {
                    acc.iter_mut().for_each(|a| *a *= rows.factor[i]);
                }
            }
        }
    }

    /// Adds the weighted values of the slots `seen`.
    ///
    /// # Safety
    /// As [`Reader::score_columns`].
    unsafe fn accumulate_columns(
        &self,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        acc: &mut [f32],
    ) -> Result<(), String> {
        let d = self.at.geometry.v_head_dim;
        let Scratch { tile, scores, .. } = scratch;
        // SAFETY: passed on.
        unsafe { self.decode(&self.tiles.v, span.page, seen.clone(), tile)? };
        for (group, acc) in acc.chunks_mut(COLUMNS * d).enumerate() {
            let weights = Left { data: &scores[group * PAGE_TOKENS * COLUMNS..], row: 1, column: COLUMNS };
            kernels::add_product(self.at.isa, weights, tile, d, acc, d, Size { m: acc.len() / d, n: d, k: seen.len() });
        }
        Ok(())
    }
}

/// Rows of `d` values, in groups of columns; those beyond the last row are zero.
fn into_columns(rows: &[f32], d: usize, columns: &mut [f32]) {
    for (group, to) in rows.chunks(COLUMNS * d).zip(columns.chunks_exact_mut(COLUMNS * d)) {
        for (i, to) in to.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
            *to = [0.0; COLUMNS];
            for (to, row) in to.iter_mut().zip(group.chunks_exact(d)) {
                *to = row[i];
            }
        }
    }
}
