//! Few rows: scores of a row lie side by side, and tiles are read by the codec's own kernels where it has them. Keys and
//! values choose apart.

use std::ops::Range;

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::CpuTilesRef;

use super::super::kernels::{self, Left, Size};
use super::super::softmax::{self, Softmax};
use super::super::work::slots;
use super::{Reader, Scratch, codec_failed};
use crate::plan::PageSpan;

impl Reader<'_> {
    /// Partial results of few rows.
    ///
    /// # Safety
    /// As [`Reader::run`]; queries are gathered.
    pub(super) unsafe fn read_for_few(
        &self,
        scratch: &mut Scratch,
        acc: &mut [f32],
        state: &mut [Softmax],
    ) -> Result<(), String> {
        let n_rows = self.rows.len() * self.heads;
        let (k_tiles, v_tiles) = (self.tiles.k.codec.cpu_tiles(), self.tiles.v.codec.cpu_tiles());
        // SAFETY: `q` holds the rows and `prepared` their room, by `reserve`.
        unsafe { self.prepare(k_tiles, scratch, n_rows)? };
        for span in self.pages {
            let seen = self.seen(span);
            if seen.is_empty() {
                continue;
            }
            // SAFETY: the page exists and its first `len` slots are written; `seen` is within them.
            unsafe { self.score(k_tiles, span, &seen, scratch, n_rows)? };
            self.weigh(span, &seen, scratch, acc, state);
            // SAFETY: as above.
            unsafe { self.accumulate(v_tiles, span, &seen, scratch, acc)? };
        }
        Ok(())
    }

    /// Brings the queries into the form that scoring needs.
    ///
    /// # Safety
    /// `scratch` holds `n_rows` rows.
    unsafe fn prepare(
        &self,
        tiles: Option<CpuTilesRef<'_>>,
        scratch: &mut Scratch,
        n_rows: usize,
    ) -> Result<(), String> {
        let (d, q, prepared) = (self.at.geometry.k_head_dim, scratch.q.as_mut_ptr(), scratch.prepared.as_mut_ptr());
        // SAFETY: the caller's promise.
        let done = unsafe {
            match tiles {
                Some(tiles) => tiles.prepare_query(q, n_rows, d, prepared.cast()),
                None => self.tiles.k.codec.transform_query(q, n_rows, d),
            }
        };
        done.map_err(|e| codec_failed("prepare queries for", &self.tiles.k, &e))
    }

    /// Scores of all rows over the slots `seen`, from the start of each row of `scratch.scores`.
    ///
    /// # Safety
    /// The slots of the page were written and nobody writes them.
    unsafe fn score(
        &self,
        tiles: Option<CpuTilesRef<'_>>,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        n_rows: usize,
    ) -> Result<(), String> {
        let (side, d) = (&self.tiles.k, self.at.geometry.k_head_dim);
        let Scratch { q, prepared, tile: space, scores, .. } = scratch;
        let Some(tiles) = tiles else {
            // SAFETY: passed on.
            unsafe { self.decode(side, span.page, seen.clone(), space)? };
            kernels::scores(self.at.isa, &q[..n_rows * d], space, d, seen.len(), scores, PAGE_TOKENS);
            return Ok(());
        };
        let (prepared, scores) = (prepared.as_ptr().cast(), scores.as_mut_ptr());
        // SAFETY: the page exists by the caller's promise; scratch has the room by `reserve`.
        let done = unsafe {
            let tile = self.store.tile(side, span.page, self.kv_head);
            tiles.score(prepared, n_rows, tile, seen.start, seen.len(), scores, PAGE_TOKENS)
        };
        done.map_err(|e| codec_failed("read", side, &e))
    }

    /// Turns scores into weights: zero where a row does not see a key, by online softmax elsewhere.
    fn weigh(
        &self,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        acc: &mut [f32],
        state: &mut [Softmax],
    ) {
        let v_dim = self.at.geometry.v_head_dim;
        let added = self.tiles.k.channels.is_some().then_some(&scratch.added);
        let rows = scratch.scores.chunks_exact_mut(PAGE_TOKENS).zip(acc.chunks_exact_mut(v_dim)).zip(state);
        for (i, ((scores, acc), state)) in rows.enumerate() {
            let visible = slots(span, &self.visible(self.rows[i / self.heads]));
            let visible = visible.start.clamp(seen.start, seen.end)..visible.end.clamp(seen.start, seen.end);
            let visible = visible.start - seen.start..visible.end - seen.start;
            scores[..visible.start].fill(0.0);
            scores[visible.end..seen.len()].fill(0.0);
            if !visible.is_empty() {
                if let Some(added) = added {
                    scores[visible.clone()].iter_mut().for_each(|score| *score += added[i]);
                }
                softmax::row(self.at.isa, &mut scores[visible], self.attend.softcap, state, acc);
            }
        }
    }

    /// Adds the weighted values of the slots `seen`.
    ///
    /// # Safety
    /// As [`Reader::score`].
    unsafe fn accumulate(
        &self,
        tiles: Option<CpuTilesRef<'_>>,
        span: &PageSpan,
        seen: &Range<usize>,
        scratch: &mut Scratch,
        acc: &mut [f32],
    ) -> Result<(), String> {
        let (side, d) = (&self.tiles.v, self.at.geometry.v_head_dim);
        let Scratch { tile: space, scores: weights, .. } = scratch;
        let (n_rows, n) = (acc.len() / d, seen.len());
        let Some(tiles) = tiles else {
            // SAFETY: passed on.
            unsafe { self.decode(side, span.page, seen.clone(), space)? };
            let weights = Left { data: weights, row: PAGE_TOKENS, column: 1 };
            kernels::add_product(self.at.isa, weights, space, d, acc, d, Size { m: n_rows, n: d, k: n });
            return Ok(());
        };
        // SAFETY: as in `score`.
        let done = unsafe {
            let tile = self.store.tile(side, span.page, self.kv_head);
            tiles.accumulate(weights.as_ptr(), PAGE_TOKENS, n_rows, tile, seen.start, n, acc.as_mut_ptr(), d)
        };
        done.map_err(|e| codec_failed("read", side, &e))
    }
}
