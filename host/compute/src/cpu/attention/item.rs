//! One work item: a chunk of query rows over some pages of a segment, for one KV head.
//!
//! Few rows ([`few`]) go through the codec's own kernels where it has them. Many rows ([`many`]), or a codec
//! without kernels, decode each tile into scratch, once for all rows, and multiply there.

mod few;
mod many;

use std::ops::Range;

use opencoti_plugin_api::PAGE_TOKENS;

use super::softmax::{COLUMNS, Softmax};
use super::work::{Item, slots};
use super::{codec_failed, grow};
use crate::channels::Channels;
use crate::cpu::executor::{Attend, LayerStep};
use crate::graph::KvGeometry;
use crate::plan::{LayerTiles, PageSpan, QueryRotation, Segment, StoreView, TileSide};

/// Most query rows for which tiles are read by the codec's own kernels. From there on a decoded tile is worth its cost.
const FEW_ROWS: usize = 16;

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
    /// The same in columns: element `i` of row `r` is `columns[(r / COLUMNS * d + i) * COLUMNS + r % COLUMNS]`.
    columns: Vec<f32>,
    /// A decoded tile.
    tile: Vec<f32>,
    /// Scores, then weights: [`PAGE_TOKENS`] for each row, side by side or in columns as the queries.
    scores: Vec<f32>,
    /// What the channels' offsets add to the scores of each row.
    added: Vec<f32>,
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
        let in_columns = rows.next_multiple_of(COLUMNS);
        grow(&mut self.columns, in_columns * g.k_head_dim, 0.0);
        grow(&mut self.tile, PAGE_TOKENS * g.k_head_dim.max(g.v_head_dim), 0.0);
        grow(&mut self.scores, in_columns * PAGE_TOKENS, 0.0);
        grow(&mut self.added, rows, 0.0);
        grow(&mut self.angles, g.k_head_dim, 0.0);
    }

    /// `n` rows of a head, `stride` apart, as their channels are stored; they lie one after the other.
    pub(super) fn stored(&mut self, channels: &Channels, head: usize, rows: &[f32], stride: usize, n: usize) -> &[f32] {
        let d = channels.head_dim();
        let to = &mut self.tile[..n * d];
        for (i, to) in to.chunks_exact_mut(d).enumerate() {
            to.copy_from_slice(&rows[i * stride..][..d]);
            channels.store(head, to);
        }
        to
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
        self.meet_keys(scratch, n_rows);
        // SAFETY: passed on; scratch holds the rows by `reserve`.
        unsafe {
            if n_rows <= FEW_ROWS {
                self.read_for_few(scratch, acc, state)?;
            } else {
                self.read_for_many(scratch, acc, state)?;
            }
        }
        let v_dim = self.at.geometry.v_head_dim;
        // SAFETY: `acc` holds the rows.
        unsafe { self.tiles.v.codec.transform_output(acc.as_mut_ptr(), n_rows, v_dim) }
            .map_err(|e| codec_failed("transform the output of", &self.tiles.v, &e))?;
        if let Some(channels) = &self.tiles.v.channels {
            for (acc, state) in acc.chunks_exact_mut(v_dim).zip(state.iter()) {
                channels.output(self.kv_head, state.sum, acc);
            }
        }
        Ok(())
    }

    /// Brings the queries to the channels of the keys as they are stored.
    fn meet_keys(&self, scratch: &mut Scratch, n_rows: usize) {
        let added = &mut scratch.added[..n_rows];
        match &self.tiles.k.channels {
            None => added.fill(0.0),
            Some(channels) => {
                let queries = scratch.q.chunks_exact_mut(channels.head_dim());
                queries.zip(added).for_each(|(q, added)| *added = channels.query(self.kv_head, q));
            }
        }
    }

    /// Copies the queries, scaled and rotated to where the segment wants them; heads of one row lie together.
    fn gather(&self, scratch: &mut Scratch) {
        // Weights are powers of two.
        let (d, scale) = (self.at.geometry.k_head_dim, self.attend.scale * std::f32::consts::LOG2_E);
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

    /// Key positions that the query of a row sees.
    fn visible(&self, row: u32) -> Range<u32> {
        self.segment.mask.visible(self.attend.rows.position(row as usize))
    }

    /// Slots of a page that any row sees.
    fn seen(&self, span: &PageSpan) -> Range<usize> {
        let ranges = self.rows.iter().map(|&row| slots(span, &self.visible(row))).filter(|r| !r.is_empty());
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// Decodes slots of a page from the start of `space`.
    ///
    /// # Safety
    /// The slots of the page were written and nobody writes them; `space` has room for them.
    unsafe fn decode(&self, side: &TileSide, page: u32, slots: Range<usize>, space: &mut [f32]) -> Result<(), String> {
        let d = side.codec.head_dim();
        assert!(space.len() >= slots.len() * d);
        // SAFETY: the caller's promise.
        let done = unsafe {
            let tile = self.store.tile(side, page, self.kv_head);
            side.codec.decode_page(tile, slots.start, slots.len(), space.as_mut_ptr(), d)
        };
        done.map_err(|e| codec_failed("read", side, &e))
    }
}
