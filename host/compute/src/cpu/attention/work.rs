//! Cutting a group's plan into work items, once a step; they serve every layer of the group.
//!
//! An item is one segment, one KV head, a chunk of the query rows and a run of the pages. Rows of a chunk are multiplied
//! with a tile together, so a tile is read once for all of them. Runs of pages are only as short as it takes to give
//! every worker several items: in prefill an item walks all pages of its segment, in the decoding of one long
//! sequence the pages are spread over the workers.

use std::ops::Range;

use crate::cpu::executor::QueryRows;
use crate::plan::{GroupPlan, Mask, PageSet, PageSpan, Segment};

/// Query rows times heads that an item works on together; bounds its scratch.
pub(super) const QUERY_ROWS: usize = 64;
/// Items per worker that the cut aims at, so that the last to finish is not far behind.
const ITEMS_PER_WORKER: u64 = 8;

/// A piece of attention that one worker does alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) segment: u32,
    pub(super) kv_head: u32,
    /// Range of [`GroupWork::rows`].
    pub(super) rows: Range<u32>,
    /// Range of the segment's pages for this head.
    pub(super) pages: Range<u32>,
    /// Where its partial results begin, counted in rows.
    pub(super) partial: u32,
}

impl Item {
    fn cost(&self) -> u64 {
        u64::from(self.rows.end - self.rows.start) * u64::from(self.pages.end - self.pages.start)
    }
}

/// The work of one group in one step. Vectors keep their capacity from step to step.
#[derive(Default, Debug)]
pub(super) struct GroupWork {
    /// Query rows, segment after segment.
    pub(super) rows: Vec<u32>,
    pub(super) items: Vec<Item>,
    /// Partial rows of row `r` and KV head `h` are `parts[first_part[r * n_kv_heads + h] .. first_part[… + 1]]`.
    pub(super) first_part: Vec<u32>,
    pub(super) parts: Vec<u32>,
    /// Partial rows in all.
    pub(super) n_partials: usize,
    /// Items before their pages are split.
    uncut: Vec<Item>,
    /// Pages written, to find two writers of one.
    written: Vec<(u32, u32)>,
}

impl GroupWork {
    /// Cuts what `plan` says of `queries` for `workers`; `heads` query heads share a KV head.
    pub(super) fn cut(
        &mut self,
        plan: &GroupPlan,
        queries: QueryRows<'_>,
        n_kv_heads: usize,
        heads: usize,
        workers: usize,
    ) -> Result<(), String> {
        self.check_writers(plan)?;
        self.rows.clear();
        self.uncut.clear();
        for (index, segment) in plan.segments.iter().enumerate() {
            if let PageSet::PerHead(lists) = &segment.pages
                && lists.len() != n_kv_heads
            {
                return Err(format!("segment {index} has {} lists of pages for {n_kv_heads} KV heads", lists.len()));
            }
            self.chunk(index, segment, queries, n_kv_heads, (QUERY_ROWS / heads).max(1));
        }
        self.split(workers);
        self.index_parts(queries.count(), n_kv_heads);
        Ok(())
    }

    /// A page has one writer; two runs in one page would be written by two workers at once.
    fn check_writers(&mut self, plan: &GroupPlan) -> Result<(), String> {
        self.written.clear();
        self.written.extend(plan.appends.iter().map(|a| (a.store, a.page)));
        self.written.extend(plan.seals.iter().map(|s| (s.store, s.page)));
        self.written.sort_unstable();
        match self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("page {} of store {} is written by two runs of one step", pair[0].1, pair[0].0)),
            None => Ok(()),
        }
    }

    /// Items of one segment with all the pages that their rows see.
    fn chunk(&mut self, index: usize, segment: &Segment, queries: QueryRows<'_>, n_kv_heads: usize, chunk: usize) {
        let first = self.rows.len();
        self.rows.extend(segment.queries.iter().flat_map(|rows| queries.within(rows)));
        let end = self.rows.len();
        for start in (first..end).step_by(chunk) {
            let rows = start..(start + chunk).min(end);
            let seen = visible(segment.mask, self.rows[rows.clone()].iter().map(|&r| queries.position(r as usize)));
            for kv_head in 0..n_kv_heads {
                let pages = trim(segment.pages.head(kv_head), &seen);
                if !pages.is_empty() {
                    let (segment, kv_head) = (index as u32, kv_head as u32);
                    let rows = rows.start as u32..rows.end as u32;
                    self.uncut.push(Item { segment, kv_head, rows, pages, partial: 0 });
                }
            }
        }
    }

    /// Splits items by pages until there is enough to share, the costly ones first.
    fn split(&mut self, workers: usize) {
        let total: u64 = self.uncut.iter().map(Item::cost).sum();
        let target = if workers == 1 { total } else { total / (workers as u64 * ITEMS_PER_WORKER) }.max(1);
        self.items.clear();
        self.n_partials = 0;
        for item in &self.uncut {
            let n_pages = item.pages.end - item.pages.start;
            let pieces = item.cost().div_ceil(target).clamp(1, n_pages.into()) as u32;
            for piece in 0..pieces {
                let bound = |i: u32| item.pages.start + (u64::from(n_pages) * u64::from(i) / u64::from(pieces)) as u32;
                let pages = bound(piece)..bound(piece + 1);
                self.items.push(Item { pages, partial: self.n_partials as u32, ..item.clone() });
                self.n_partials += (item.rows.end - item.rows.start) as usize;
            }
        }
        self.items.sort_unstable_by_key(|i| (std::cmp::Reverse(i.cost()), i.partial));
    }

    /// Lists the partial rows of each row and head, by a counting sort.
    fn index_parts(&mut self, n_rows: usize, n_kv_heads: usize) {
        let GroupWork { rows, items, first_part, parts, n_partials, .. } = self;
        let slot =
            |item: &Item, i: u32| rows[(item.rows.start + i) as usize] as usize * n_kv_heads + item.kv_head as usize;
        first_part.clear();
        first_part.resize(n_rows * n_kv_heads + 2, 0);
        let each = |f: &mut dyn FnMut(usize, u32)| {
            for item in items.iter() {
                for i in 0..item.rows.end - item.rows.start {
                    f(slot(item, i), item.partial + i);
                }
            }
        };
        // Counts two places on, so that after the sums the filling pass leaves every start in its own place.
        each(&mut |slot, _| first_part[slot + 2] += 1);
        for i in 2..first_part.len() {
            first_part[i] += first_part[i - 1];
        }
        parts.clear();
        parts.resize(*n_partials, 0);
        each(&mut |slot, partial| {
            let at = &mut first_part[slot + 1];
            parts[*at as usize] = partial;
            *at += 1;
        });
    }
}

/// Key positions that any of the queries sees.
fn visible(mask: Mask, positions: impl Iterator<Item = u32>) -> Range<u32> {
    positions.map(|p| mask.visible(p)).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// Slots of a page whose positions are in `seen`.
pub(super) fn slots(span: &PageSpan, seen: &Range<u32>) -> Range<usize> {
    let clip = |position: u32| position.saturating_sub(span.start_pos).min(span.len) as usize;
    let (start, end) = (clip(seen.start), clip(seen.end));
    start..end.max(start)
}

/// The pages but those at either end that nobody sees.
fn trim(pages: &[PageSpan], seen: &Range<u32>) -> Range<u32> {
    let needed = |span: &PageSpan| !slots(span, seen).is_empty();
    match pages.iter().position(needed) {
        Some(first) => first as u32..pages.iter().rposition(needed).unwrap_or(first) as u32 + 1,
        None => 0..0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{AppendRun, QueryRotation, Residency, Step};

    fn segment(queries: Range<u32>, n_pages: u32, mask: Mask) -> Segment {
        let pages = (0..n_pages).map(|p| PageSpan { page: p, start_pos: p * 128, len: 128 }).collect();
        Segment {
            queries: vec![queries],
            store: 0,
            pages: PageSet::All(pages),
            mask,
            rotation: QueryRotation::Own,
            residency: Residency::Device,
        }
    }

    fn cut(segments: Vec<Segment>, positions: &[u32], n_kv_heads: usize, heads: usize, workers: usize) -> GroupWork {
        cut_rows(segments, QueryRows::all(&step(positions)), n_kv_heads, heads, workers)
    }

    fn step(positions: &[u32]) -> Step {
        Step { positions: positions.to_vec(), ..Step::default() }
    }

    fn cut_rows(
        segments: Vec<Segment>,
        queries: QueryRows<'_>,
        n_kv_heads: usize,
        heads: usize,
        workers: usize,
    ) -> GroupWork {
        let mut work = GroupWork::default();
        work.cut(&GroupPlan { segments, ..GroupPlan::default() }, queries, n_kv_heads, heads, workers).unwrap();
        work
    }

    #[test]
    fn only_output_rows_are_cut_when_only_they_are_asked_for() {
        let segments = vec![segment(0..3, 4, Mask::Full), segment(1..6, 1, Mask::Full), segment(6..7, 1, Mask::Full)];
        let step = Step { outputs: vec![2, 5], ..step(&[600; 7]) };
        let work = cut_rows(segments, QueryRows::outputs(&step), 1, 1, 1);
        let rows: Vec<_> = work.items.iter().map(|i| &work.rows[i.rows.start as usize..i.rows.end as usize]).collect();
        assert_eq!(rows, [&[0][..], &[0, 1]], "output 0 is in two segments, output 1 in one, and the last has none");
        assert_eq!(work.n_partials, 3);
    }

    #[test]
    fn one_long_sequence_is_spread_over_all_workers_by_pages() {
        let work = cut(vec![segment(0..1, 64, Mask::Causal)], &[64 * 128 - 1], 2, 4, 8);
        assert!(work.items.len() >= 16, "{}", work.items.len());
        let pages: u32 = work.items.iter().map(|i| i.pages.end - i.pages.start).sum();
        assert_eq!(pages, 2 * 64);
        assert_eq!(work.parts.len(), work.items.len());
    }

    #[test]
    fn a_single_worker_walks_each_head_once() {
        let work = cut(vec![segment(0..1, 64, Mask::Causal)], &[64 * 128 - 1], 2, 4, 1);
        assert_eq!(work.items.len(), 2);
    }

    #[test]
    fn rows_that_share_a_segment_are_in_one_item() {
        let work = cut(vec![segment(0..16, 3, Mask::Full)], &[500; 16], 1, 4, 1);
        assert_eq!(work.items.len(), 1);
        assert_eq!(work.items[0].rows, 0..16);
    }

    #[test]
    fn pages_outside_every_window_are_not_walked() {
        let work = cut(vec![segment(0..1, 10, Mask::Window(100))], &[700], 1, 1, 1);
        assert_eq!(work.items[0].pages, 4..6);
        assert!(cut(vec![segment(0..1, 0, Mask::Full)], &[5], 1, 1, 1).items.is_empty());
    }

    #[test]
    fn every_row_and_head_finds_its_partial_rows() {
        let segments = vec![segment(0..3, 4, Mask::Full), segment(2..5, 1, Mask::Full)];
        let work = cut(segments, &[600; 5], 2, 1, 4);
        let mut seen = vec![0; work.n_partials];
        for row in 0..5 {
            for head in 0..2 {
                let range = work.first_part[row * 2 + head] as usize..work.first_part[row * 2 + head + 1] as usize;
                for &part in &work.parts[range] {
                    seen[part as usize] += 1;
                    let item = work
                        .items
                        .iter()
                        .find(|i| (i.partial..i.partial + i.rows.end - i.rows.start).contains(&part))
                        .unwrap();
                    assert_eq!(item.kv_head as usize, head);
                    assert_eq!(work.rows[(item.rows.start + part - item.partial) as usize] as usize, row);
                }
            }
        }
        assert!(seen.iter().all(|&n| n == 1), "{seen:?}");
    }

    #[test]
    fn two_writers_of_a_page_and_missing_heads_are_refused() {
        let run = |rows: Range<u32>, first_slot| AppendRun { rows, store: 1, page: 7, first_slot };
        let mut work = GroupWork::default();
        let plan = GroupPlan { appends: vec![run(0..1, 0), run(1..2, 1)], ..GroupPlan::default() };
        let error = work.cut(&plan, QueryRows::all(&step(&[0, 1])), 1, 1, 1).unwrap_err();
        assert_eq!(error, "page 7 of store 1 is written by two runs of one step");
        let per_head = Segment { pages: PageSet::PerHead(vec![vec![]]), ..segment(0..1, 1, Mask::Full) };
        let plan = GroupPlan { segments: vec![per_head], ..GroupPlan::default() };
        let error = work.cut(&plan, QueryRows::all(&step(&[0])), 2, 1, 1).unwrap_err();
        assert_eq!(error, "segment 0 has 1 lists of pages for 2 KV heads");
    }
}
