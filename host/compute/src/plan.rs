//! What a step does: tokens, where their keys and values go, and attention as a list of segments.
//!
//! The cache builds a plan, an executor runs it. A segment says which rows of the batch read which run of pages, under
//! which mask, at which query position. Partial results of one row over several segments merge exactly by
//! log-sum-exp, so how a cache is cut into segments never changes the result beyond float tolerance.
//!
//! Recurrent layers keep a state of fixed size a sequence. It lives in planes, each the state of all such layers after some
//! token. Like pages, planes never change once written: a step begins with one plane and writes others, so that going back
//! to a token, sharing and copying are matters of which plane is named.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;

use crate::channels::Channels;
use crate::graph::RowIndex;

/// Which keys of a segment a query may see, by position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mask {
    /// Keys at or before the query.
    Causal,
    /// Every key.
    Full,
    /// Keys `k` at or before the query `p` with `p - k < w`.
    Window(u32),
}

impl Mask {
    /// Key positions visible to a query at `position`, as a half-open range.
    pub fn visible(self, position: u32) -> Range<u32> {
        match self {
            Mask::Causal => 0..position + 1,
            Mask::Full => 0..u32::MAX,
            Mask::Window(w) => (position + 1).saturating_sub(w)..position + 1,
        }
    }
}

/// The rope position at which queries meet a segment's keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueryRotation {
    /// The token's own.
    Own,
    /// The token's own plus an offset (a shifted context: no key is rewritten).
    Offset(i32),
    /// One position for all queries (chunked position schemes).
    At(u32),
}

impl QueryRotation {
    /// Position used for a query whose token stands at `own`.
    pub fn position(self, own: u32) -> u32 {
        match self {
            QueryRotation::Own => own,
            QueryRotation::Offset(by) => own.saturating_add_signed(by),
            QueryRotation::At(position) => position,
        }
    }
}

/// Where a segment's pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residency {
    /// In the executor's own memory.
    Device,
    /// In host memory, streamed through staging slots (the CPU executor reads it in place).
    Host,
}

/// The first `len` slots of a page, holding the keys and values of positions `start_pos ..`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageSpan {
    /// Page index in the segment's store.
    pub page: u32,
    /// Position of the token in slot 0.
    pub start_pos: u32,
    /// Slots to read, at most [`PAGE_TOKENS`].
    pub len: u32,
}

/// The pages a segment reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PageSet {
    /// The same pages for every KV head.
    All(Vec<PageSpan>),
    /// A selection per KV head.
    PerHead(Vec<Vec<PageSpan>>),
}

impl PageSet {
    /// Pages of one KV head.
    pub fn head(&self, kv_head: usize) -> &[PageSpan] {
        match self {
            PageSet::All(pages) => pages,
            PageSet::PerHead(heads) => &heads[kv_head],
        }
    }
}

/// One run of attention work in one store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Rows of the batch that read it; of several sequences when they share these pages.
    pub queries: Vec<Range<u32>>,
    /// Index into [`Step::stores`].
    pub store: u32,
    /// What they read.
    pub pages: PageSet,
    /// Which of it each may see.
    pub mask: Mask,
    /// Where the queries stand.
    pub rotation: QueryRotation,
    /// Where the pages are.
    pub residency: Residency,
}

/// Where the keys and values of a run of rows are written, before any segment is read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AppendRun {
    /// Rows of the batch.
    pub rows: Range<u32>,
    /// Index into [`Step::stores`].
    pub store: u32,
    /// Page in that store.
    pub page: u32,
    /// Slot of the first row.
    pub first_slot: u32,
}

/// A page of exact tokens that is encoded into a page of another store: after the step's writes, before its reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SealRun {
    /// Index into [`Step::stores`] of the exact tokens.
    pub from_store: u32,
    /// Page in that store.
    pub from_page: u32,
    /// Its slots that hold tokens; the codec is given the last of them in place of those that are missing.
    pub filled: u32,
    /// Index into [`Step::stores`] of the page to write.
    pub store: u32,
    /// Page in that store.
    pub page: u32,
}

/// The plan of one cache group for one step. Serves every layer of the group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupPlan {
    /// Writes.
    pub appends: Vec<AppendRun>,
    /// Pages encoded as a whole.
    pub seals: Vec<SealRun>,
    /// Reads.
    pub segments: Vec<Segment>,
}

/// One side of one layer in a page.
#[derive(Clone)]
pub struct TileSide {
    /// The codec opened for this side and head size.
    pub codec: Codec,
    /// Bytes from the start of the page to KV head 0's tile.
    pub offset: usize,
    /// Bytes of a tile; head `h` lies at `offset + h * tile_bytes`.
    pub tile_bytes: usize,
    /// What is done to the channels before the codec sees them.
    pub channels: Option<Arc<Channels>>,
}

/// One layer's tiles in a page.
#[derive(Clone)]
pub struct LayerTiles {
    /// Keys.
    pub k: TileSide,
    /// Values.
    pub v: TileSide,
}

impl LayerTiles {
    /// Tiles of one side.
    pub fn side(&self, side: Side) -> &TileSide {
        match side {
            Side::K => &self.k,
            Side::V => &self.v,
        }
    }
}

/// Pages of one cache group in one pair of codecs, as an executor sees them.
#[derive(Clone)]
pub struct StoreView {
    /// Cache group it belongs to.
    pub group: u32,
    /// Page 0.
    pub base: NonNull<u8>,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages.
    pub n_pages: usize,
    /// Tiles of each layer, in the order of the group's layers.
    pub layers: Vec<LayerTiles>,
}

// SAFETY: a view is a description of memory that the cache owns and keeps in place; who may write which tile when is
// the plan's contract: a page has one writer, and an executor finishes a layer's writes before it reads.
unsafe impl Send for StoreView {}
// SAFETY: as above.
unsafe impl Sync for StoreView {}

impl StoreView {
    /// First byte of the tile of `kv_head` on `side` of page `page`.
    ///
    /// # Safety
    /// `page < n_pages`, and `side` and `kv_head` belong to this store.
    pub unsafe fn tile(&self, side: &TileSide, page: u32, kv_head: usize) -> *mut u8 {
        debug_assert!((page as usize) < self.n_pages);
        // SAFETY: inside the store's memory by the caller's promise.
        unsafe { self.base.as_ptr().add(page as usize * self.page_bytes + side.offset + kv_head * side.tile_bytes) }
    }
}

/// Planes of recurrent state, as an executor sees them.
#[derive(Clone)]
pub struct StateView {
    /// Plane 0.
    pub base: NonNull<f32>,
    /// f32 words of a plane.
    pub plane_words: usize,
    /// Planes.
    pub n_planes: usize,
}

// SAFETY: a view describes memory that the cache owns and keeps in place; a plane that a step writes is read by no run of the
// same step, which `Step::check` makes sure of.
unsafe impl Send for StateView {}
// SAFETY: as above.
unsafe impl Sync for StateView {}

impl StateView {
    /// First word of a plane.
    ///
    /// # Safety
    /// `plane < n_planes`.
    pub unsafe fn plane(&self, plane: u32) -> *mut f32 {
        debug_assert!((plane as usize) < self.n_planes);
        // SAFETY: inside the store's memory by the caller's promise.
        unsafe { self.base.as_ptr().add(plane as usize * self.plane_words) }
    }
}

/// A plane that a run writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateWrite {
    /// Rows of the run that the state has seen, at least 1.
    pub after: u32,
    /// Where it is written.
    pub plane: u32,
}

/// How one sequence's rows pass through the recurrent layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateRun {
    /// Rows of the batch, in order of position.
    pub rows: Range<u32>,
    /// The state before the first row; `None` at the beginning of a sequence (all zeros).
    pub from: Option<u32>,
    /// Where states are kept, ascending by `after`.
    pub to: Vec<StateWrite>,
}

/// Everything one execution of the graph needs.
#[derive(Clone, Default)]
pub struct Step {
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Position of each row.
    pub positions: Vec<u32>,
    /// Token type of each row, for models that tell the parts of a pair of texts apart; empty for all 0.
    pub token_types: Vec<u32>,
    /// Rows whose hidden state is wanted, ascending.
    pub outputs: Vec<u32>,
    /// Of these, by their places in `outputs`, the ones whose logits are wanted, ascending.
    pub logits: Vec<u32>,
    /// One plan for each cache group of the graph, in their order.
    pub groups: Vec<GroupPlan>,
    /// The stores the plans refer to.
    pub stores: Vec<StoreView>,
    /// For a model with recurrent layers: runs that cover every row once, in order.
    pub state_runs: Vec<StateRun>,
    /// The planes the runs refer to.
    pub states: Option<StateView>,
}

impl fmt::Display for PageSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}@{}+{}", self.page, self.start_pos, self.len)
    }
}

impl fmt::Display for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |pages: &[PageSpan]| pages.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        match self {
            PageSet::All(pages) => write!(f, "[{}]", list(pages)),
            PageSet::PerHead(heads) => {
                let heads: Vec<String> =
                    heads.iter().enumerate().map(|(h, pages)| format!("h{h}: {}", list(pages))).collect();
                write!(f, "[{}]", heads.join("; "))
            }
        }
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<String> = self.queries.iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
        write!(f, "read  rows {} store {} {} ", rows.join(","), self.store, self.pages)?;
        match self.mask {
            Mask::Causal => write!(f, "causal")?,
            Mask::Full => write!(f, "full")?,
            Mask::Window(w) => write!(f, "window {w}")?,
        }
        match self.rotation {
            QueryRotation::Own => {}
            QueryRotation::Offset(by) => write!(f, " q{by:+}")?,
            QueryRotation::At(position) => write!(f, " q@{position}")?,
        }
        if self.residency == Residency::Host {
            write!(f, " host")?;
        }
        Ok(())
    }
}

impl fmt::Display for GroupPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for a in &self.appends {
            writeln!(
                f,
                "write rows {}..{} store {} p{}[{}..{}]",
                a.rows.start,
                a.rows.end,
                a.store,
                a.page,
                a.first_slot,
                a.first_slot + a.rows.end - a.rows.start
            )?;
        }
        for s in &self.seals {
            writeln!(f, "seal  store {} p{}+{} as store {} p{}", s.from_store, s.from_page, s.filled, s.store, s.page)?;
        }
        for s in &self.segments {
            writeln!(f, "{s}")?;
        }
        Ok(())
    }
}

impl fmt::Display for StateRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "state rows {}..{} from ", self.rows.start, self.rows.end)?;
        match self.from {
            Some(plane) => write!(f, "s{plane}")?,
            None => write!(f, "zero")?,
        }
        self.to.iter().try_for_each(|to| write!(f, " +{}: s{}", to.after, to.plane))
    }
}

/// Ways in which a plan can contradict itself or its stores.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// A reference beyond what the step holds.
    #[error("the plan of group {group} names {what} {found}, but there are only {limit}")]
    OutOfRange {
        /// Cache group.
        group: usize,
        /// What was referred to.
        what: &'static str,
        /// The reference.
        found: u64,
        /// What exists.
        limit: u64,
    },
    /// Two lists that must agree do not.
    #[error("the step has {found} {what}, expected {expected}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there must be.
        expected: usize,
    },
    /// The runs through the recurrent layers contradict the step or one another.
    #[error("the run of states over rows {start}..{end} {what}")]
    State {
        /// First row.
        start: u32,
        /// One past the last row.
        end: u32,
        /// What is wrong with it.
        what: &'static str,
    },
}

impl Step {
    /// What a row chooses a row of a table by.
    pub fn index(&self, index: RowIndex, row: usize) -> u32 {
        match index {
            RowIndex::Position => self.positions[row],
            RowIndex::TokenType => self.token_types.get(row).copied().unwrap_or(0),
        }
    }

    /// Checks every index before unsafe code relies on it. Linear in the size of the plan.
    pub fn check(&self, n_groups: usize) -> Result<(), PlanError> {
        let rows = self.tokens.len();
        let count = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(PlanError::Count { what, found, expected }),
        };
        count("positions", self.positions.len(), rows)?;
        count("group plans", self.groups.len(), n_groups)?;
        for (group, plan) in self.groups.iter().enumerate() {
            let within = |what, found: u64, limit: u64| match found < limit {
                true => Ok(()),
                false => Err(PlanError::OutOfRange { group, what, found, limit }),
            };
            let store = |index: u32| {
                within("store", index.into(), self.stores.len() as u64)?;
                let store = &self.stores[index as usize];
                match store.group as usize == group {
                    true => Ok(store),
                    false => Err(PlanError::OutOfRange {
                        group,
                        what: "a store of group",
                        found: store.group.into(),
                        limit: n_groups as u64,
                    }),
                }
            };
            for a in &plan.appends {
                let pages = store(a.store)?.n_pages as u64;
                within("row", u64::from(a.rows.end).saturating_sub(1), rows as u64)?;
                within("page", a.page.into(), pages)?;
                let last = u64::from(a.first_slot) + u64::from(a.rows.end.saturating_sub(a.rows.start));
                within("slot", last.saturating_sub(1), PAGE_TOKENS as u64)?;
            }
            for s in &plan.seals {
                within("page", s.from_page.into(), store(s.from_store)?.n_pages as u64)?;
                within("page", s.page.into(), store(s.store)?.n_pages as u64)?;
                within("slot", u64::from(s.filled.wrapping_sub(1)), PAGE_TOKENS as u64)?;
            }
            for s in &plan.segments {
                let store = store(s.store)?;
                for r in &s.queries {
                    within("row", u64::from(r.end).saturating_sub(1), rows as u64)?;
                }
                let sets: &[Vec<PageSpan>] = match &s.pages {
                    PageSet::All(pages) => std::slice::from_ref(pages),
                    PageSet::PerHead(heads) => heads,
                };
                for span in sets.iter().flatten() {
                    within("page", span.page.into(), store.n_pages as u64)?;
                    within("slot", u64::from(span.len).saturating_sub(1), PAGE_TOKENS as u64)?;
                }
            }
        }
        self.check_states()?;
        match self.outputs.last() {
            Some(&last) if last as usize >= rows => {
                Err(PlanError::OutOfRange { group: 0, what: "output row", found: last.into(), limit: rows as u64 })
            }
            _ => Ok(()),
        }
    }

    /// Runs cover the rows in order, planes exist, and no plane that is written is written twice or read.
    fn check_states(&self) -> Result<(), PlanError> {
        let planes = self.states.as_ref().map_or(0, |states| states.n_planes as u64);
        let mut written: Vec<u32> = self.state_runs.iter().flat_map(|run| run.to.iter().map(|to| to.plane)).collect();
        written.sort_unstable();
        let twice = written.windows(2).any(|pair| pair[0] == pair[1]);
        let mut next = 0;
        for run in &self.state_runs {
            let (start, end) = (run.rows.start, run.rows.end);
            let error = |what| Err(PlanError::State { start, end, what });
            if start != next || end <= start || end as usize > self.tokens.len() {
                return error("does not go on where the one before it ends");
            }
            if run.from.iter().chain(run.to.iter().map(|to| &to.plane)).any(|&plane| u64::from(plane) >= planes) {
                return error("names a plane that does not exist");
            }
            if twice || run.from.is_some_and(|plane| written.binary_search(&plane).is_ok()) {
                return error("reads or writes a plane that the step writes");
            }
            let ascending = run.to.windows(2).all(|pair| pair[0].after < pair[1].after);
            if !ascending || run.to.iter().any(|to| to.after == 0 || to.after > end - start) {
                return error("keeps states after rows that it does not have, or out of order");
            }
            next = end;
        }
        match self.state_runs.is_empty() || next as usize == self.tokens.len() {
            true => Ok(()),
            false => {
                Err(PlanError::Count { what: "rows with a state", found: next as usize, expected: self.tokens.len() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(runs: Vec<StateRun>) -> Step {
        let states = StateView { base: NonNull::dangling(), plane_words: 1, n_planes: 4 };
        Step { tokens: vec![0; 3], positions: vec![0; 3], state_runs: runs, states: Some(states), ..Step::default() }
    }

    fn run(rows: Range<u32>, from: Option<u32>, to: &[(u32, u32)]) -> StateRun {
        StateRun { rows, from, to: to.iter().map(|&(after, plane)| StateWrite { after, plane }).collect() }
    }

    #[test]
    fn runs_of_states_cover_the_rows_and_write_planes_that_nobody_reads() {
        assert_eq!(step(vec![run(0..1, Some(0), &[(1, 1)]), run(1..3, None, &[(1, 2), (2, 3)])]).check(0), Ok(()));
        for (wrong, what) in [
            (vec![run(0..2, None, &[])], "rows with a state"),
            (vec![run(1..3, None, &[])], "does not go on"),
            (vec![run(0..3, Some(4), &[])], "does not exist"),
            (vec![run(0..3, Some(1), &[(3, 1)])], "reads or writes"),
            (vec![run(0..1, None, &[(1, 1)]), run(1..3, None, &[(2, 1)])], "reads or writes"),
            (vec![run(0..1, None, &[(1, 1)]), run(1..3, Some(1), &[(2, 2)])], "reads or writes"),
            (vec![run(0..3, None, &[(4, 0)])], "rows that it does not have"),
            (vec![run(0..3, None, &[(2, 0), (1, 1)])], "out of order"),
        ] {
            let error = step(wrong).check(0).expect_err(what).to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
