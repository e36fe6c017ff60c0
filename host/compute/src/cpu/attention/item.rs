//! One work item: a chunk of query rows over some pages of a segment, for one KV head.
//!
//! Few rows go through the codec's own kernels where it has them; many rows, or a codec without kernels, decode each tile
//! into scratch and multiply there. Keys and values choose apart.

use std::ops::Range;

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::CpuTilesRef;

use super::kernels::{self, Softmax};
use super::work::{Item, slots};
use super::{codec_failed, grow};
use crate::cpu::executor::{Attend, LayerStep};
use crate::graph::KvGeometry;
use crate::plan::{LayerTiles, PageSpan, QueryRotation, Segment, StoreView, TileSide};

/// Most query rows for which a codec's own kernels are used; more rows make a decoded tile worth its cost.
const FUSED_ROWS: usize = 32;

/// 64 aligned bytes.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// A worker's memory.
#[derive(Default)]
pub(super) struct Scratch {
    /// Query rows, at their rope position and scaled.
    q: Vec<f32>,
    /// The same as the codec prepared them.
    prepared: Vec<Line>,
    /// A decoded tile.
    tile: Vec<f32>,
    /// Scores, then weights, [`PAGE_TOKENS`] a row.
    scores: Vec<f32>,
    /// Cosines and sines of a position other than the row's own.
    angles: Vec<f32>,
}

impl Scratch {
    /// Room for the rows of a page of a head of `d` values.
    pub(super) fn page(&mut self, d: usize) -> &mut [f32] {
        &mut self.tile[..PAGE_TOKENS * d]
    }

    /// Makes room for `rows` query rows.
    pub(super) fn reserve(&mut self, rows: usize, g: &KvGeometry, query_bytes: usize) {
        grow(&mut self.q, rows * g.k_head_dim, 0.0);
        grow(&mut self.prepared, rows * query_bytes.div_ceil(64), Line { _bytes: [0; 64] });
        grow(&mut self.tile, PAGE_TOKENS * g.k_head_dim.max(g.v_head_dim), 0.0);
        grow(&mut self.scores, rows * PAGE_TOKENS, 0.0);
        grow(&mut self.angles, g.k_head_dim, 0.0);
    }
}

/// An item with what it refers to.
pub(super) struct Reader<'a> {
    at: LayerStep<'a>,
    attend: &'a Attend<'a>,
    segment: &'a Segment,
    store: &'a StoreView,
    tiles: &'a LayerTiles,
    kv_head: usize,
    pages: &'a [PageSpan],
    /// Query rows, as `attend.rows` counts them.
    rows: &'a [u32],
    /// Query heads that share the KV head.
    heads: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(at: LayerStep<'a>, attend: &'a Attend<'a>, item: &Item, rows: &'a [u32]) -> Self {
        let segment = &at.step.groups[at.group].segments[item.segment as usize];
        let store = &at.step.stores[segment.store as usize];
        let kv_head = item.kv_head as usize;
        let pages = &segment.pages.head(kv_head)[item.pages.start as usize..item.pages.end as usize];
        let (tiles, heads) = (&store.layers[at.layer], attend.n_heads / at.geometry.n_kv_heads);
        Reader { at, attend, segment, store, tiles, kv_head, pages, rows, heads }
    }

    /// The partial result of each query row: weighted values in `acc`, in the plain basis, and their weights' maximum
    /// and sum in `state`.
    ///
    /// # Safety
    /// The step was checked, and nobody writes its tiles.
    pub(super) unsafe fn run(
        self,
        scratch: &mut Scratch,
        acc: &mut [f32],
        state: &mut [Softmax],
    ) -> Result<(), String> {
        acc.fill(0.0);
        state.fill(Softmax::EMPTY);
        let n_rows = self.rows.len() * self.heads;
        self.gather(scratch);
        let k_tiles = fused(&self.tiles.k, n_rows);
        let v_tiles = fused(&self.tiles.v, n_rows);
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
        let v_dim = self.at.geometry.v_head_dim;
        // SAFETY: `acc` holds the rows.
        unsafe { self.tiles.v.codec.transform_output(acc.as_mut_ptr(), n_rows, v_dim) }
            .map_err(|e| codec_failed("transform the output of", &self.tiles.v, &e))
    }

    /// Copies the queries, scaled and rotated to where the segment wants them; heads of one row lie together.
    fn gather(&self, scratch: &mut Scratch) {
        let (d, scale) = (self.at.geometry.k_head_dim, self.attend.scale);
        let (width, first) = (self.attend.n_heads * d, self.kv_head * self.heads * d);
        for (&row, to) in self.rows.iter().zip(scratch.q.chunks_exact_mut(self.heads * d)) {
            let from = &self.attend.q[row as usize * width + first..][..self.heads * d];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * scale);
            if let Some(rope) = self.attend.rope {
                let n_rot = rope.n_rot();
                let table = match self.segment.rotation {
                    QueryRotation::Own => {
                        &self.attend.angles[self.attend.rows.step_row(row as usize) * n_rot..][..n_rot]
                    }
                    other => {
                        let table = &mut scratch.angles[..n_rot];
                        rope.angles(other.position(self.attend.rows.position(row as usize)), table);
                        table
                    }
                };
                to.chunks_exact_mut(d).for_each(|head| rope.rotate(table, head));
            }
        }
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

    /// Key positions that the query of a row sees.
    fn visible(&self, row: u32) -> Range<u32> {
        self.segment.mask.visible(self.attend.rows.position(row as usize))
    }

    /// Slots of a page that any row sees.
    fn seen(&self, span: &PageSpan) -> Range<usize> {
        let ranges = self.rows.iter().map(|&row| slots(span, &self.visible(row))).filter(|r| !r.is_empty());
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
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
        // SAFETY: the page exists by the caller's promise; scratch has the room by `reserve`.
        let done = unsafe {
            let tile = self.store.tile(side, span.page, self.kv_head);
            match tiles {
                Some(tiles) => tiles.score(
                    prepared.as_ptr().cast(),
                    n_rows,
                    tile,
                    seen.start,
                    seen.len(),
                    scores.as_mut_ptr(),
                    PAGE_TOKENS,
                ),
                None => side.codec.decode_page(tile, seen.start, seen.len(), space.as_mut_ptr(), d),
            }
        };
        done.map_err(|e| codec_failed("read", side, &e))?;
        if tiles.is_none() {
            kernels::scores(self.at.isa, &q[..n_rows * d], space, d, seen.len(), scores, PAGE_TOKENS);
        }
        Ok(())
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
        let rows = scratch.scores.chunks_exact_mut(PAGE_TOKENS).zip(acc.chunks_exact_mut(v_dim)).zip(state);
        for (i, ((scores, acc), state)) in rows.enumerate() {
            let visible = slots(span, &self.visible(self.rows[i / self.heads]));
            let visible = visible.start.clamp(seen.start, seen.end)..visible.end.clamp(seen.start, seen.end);
            let visible = visible.start - seen.start..visible.end - seen.start;
            scores[..visible.start].fill(0.0);
            scores[visible.end..seen.len()].fill(0.0);
            if !visible.is_empty() {
                kernels::softmax(self.at.isa, &mut scores[visible], self.attend.softcap, state, acc);
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
        // SAFETY: as in `score`.
        let done = unsafe {
            let tile = self.store.tile(side, span.page, self.kv_head);
            match tiles {
                Some(tiles) => tiles.accumulate(
                    weights.as_ptr(),
                    PAGE_TOKENS,
                    acc.len() / d,
                    tile,
                    seen.start,
                    seen.len(),
                    acc.as_mut_ptr(),
                    d,
                ),
                None => side.codec.decode_page(tile, seen.start, seen.len(), space.as_mut_ptr(), d),
            }
        };
        done.map_err(|e| codec_failed("read", side, &e))?;
        if tiles.is_none() {
            kernels::accumulate(self.at.isa, weights, PAGE_TOKENS, space, d, seen.len(), acc);
        }
        Ok(())
    }
}

/// The codec's kernels if it has some and there are few rows.
fn fused(side: &TileSide, n_rows: usize) -> Option<CpuTilesRef<'_>> {
    side.codec.cpu_tiles().filter(|_| n_rows <= FUSED_ROWS)
}
