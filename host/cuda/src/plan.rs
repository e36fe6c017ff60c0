//! A step's plans as the flat arrays that attention kernels read.
//!
//! A segment becomes *items*: some of its query rows, one KV head, a run of its pages. An item is what one block of threads does at
//! a time; each of its rows gives a partial result, and a list for each row and group of heads says which partials merge.

use std::ops::Range;

use opencoti_compute::plan::{GroupPlan, Mask, PageSet, PageSpan, QueryRotation, Segment, Step};

use crate::kernels::{Append, Counts, Item, Query, Span};

/// What is the same for all steps of a cache group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GroupShape {
    pub(crate) kv_heads: usize,
    /// Query heads of a KV head.
    pub(crate) heads: usize,
    /// Of these, so many are in a block together.
    pub(crate) together: usize,
}

impl GroupShape {
    /// Of a block of `rows` query rows, at least 16.
    pub(crate) fn new(kv_heads: usize, heads: usize) -> GroupShape {
        let together = (1..=heads.min(16)).rev().find(|n| heads.is_multiple_of(*n)).unwrap_or(1);
        GroupShape { kv_heads, heads, together }
    }

    /// Lists of partials for each row.
    pub(crate) fn lists(&self) -> usize {
        self.kv_heads * self.heads / self.together
    }
}

/// How a store's kernels work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreKernels {
    /// Store as the kernels number it.
    pub(crate) store: u32,
    /// Pair of codecs.
    pub(crate) class: usize,
    /// Query rows of a block for few and for many rows.
    pub(crate) few_rows: usize,
    pub(crate) many_rows: usize,
}

/// The arrays of one group. Kept between steps, so that a step allocates nothing once they have grown.
#[derive(Default, Debug)]
pub(crate) struct FlatGroup {
    pub(crate) appends: Vec<Append>,
    pub(crate) items: Vec<Item>,
    /// Of items with few, then with many rows, class by class.
    pub(crate) counts: Vec<Counts>,
    pub(crate) queries: Vec<Query>,
    pub(crate) spans: Vec<Span>,
    /// Where the list of each row and group of heads starts, and where the last ends.
    pub(crate) first: Vec<u32>,
    pub(crate) partials: Vec<u32>,
    /// Partial results in all.
    pub(crate) n_partials: u32,
    buckets: Vec<Vec<Item>>,
    /// Pairs of a list and a partial.
    listed: Vec<(u32, u32)>,
    rows: Vec<u32>,
}

/// Positions by which queries rotate, beyond those of the step's own rows.
#[derive(Default, Debug)]
pub(crate) struct ExtraAngles {
    pub(crate) positions: Vec<u32>,
}

impl FlatGroup {
    /// Fills the arrays with `plan`. `stores` are those of the step; `blocks` is how many items fill the card.
    pub(crate) fn fill(
        &mut self,
        step: &Step,
        plan: &GroupPlan,
        shape: GroupShape,
        stores: &[Option<StoreKernels>],
        classes: usize,
        blocks: usize,
        extra: &mut ExtraAngles,
    ) {
        self.clear(classes);
        for run in &plan.appends {
            let Some(store) = stores[run.store as usize] else { continue };
            let slots = run.rows.clone().zip(run.first_slot..);
            self.appends.extend(slots.map(|(row, slot)| Append { row, store: store.store, page: run.page, slot }));
        }
        let per_item = pages_of_item(step, plan, shape, stores, blocks);
        for segment in &plan.segments {
            let Some(store) = stores[segment.store as usize] else { continue };
            self.segment(step, segment, shape, store, per_item, extra);
        }
        self.finish(step.tokens.len() * shape.lists());
    }

    fn clear(&mut self, classes: usize) {
        self.appends.clear();
        self.items.clear();
        self.counts.clear();
        self.queries.clear();
        self.spans.clear();
        self.first.clear();
        self.partials.clear();
        self.listed.clear();
        self.n_partials = 0;
        self.buckets.resize_with(classes * 2, Vec::new);
        self.buckets.iter_mut().for_each(Vec::clear);
    }

    fn segment(
        &mut self,
        step: &Step,
        segment: &Segment,
        shape: GroupShape,
        store: StoreKernels,
        per_item: usize,
        extra: &mut ExtraAngles,
    ) {
        let mut rows = std::mem::take(&mut self.rows);
        rows.clear();
        rows.extend(segment.queries.iter().cloned().flatten());
        let (many, at_once) = rows_of_item(rows.len(), shape, store);
        for rows in rows.chunks(at_once) {
            let seen = seen(step, segment, rows);
            let first_query = self.queries.len() as u32;
            for &row in rows {
                let position = step.positions[row as usize];
                let angle = match segment.rotation {
                    QueryRotation::Own => row,
                    other => {
                        extra.positions.push(other.position(position));
                        (step.tokens.len() + extra.positions.len() - 1) as u32
                    }
                };
                self.queries.push(Query { row, position, angle });
            }
            let (mask, window) = match segment.mask {
                Mask::Causal => (0, 0),
                Mask::Full => (1, 0),
                Mask::Window(w) => (2, w),
            };
            let item = Item {
                first_query,
                n_queries: rows.len() as u32,
                first_span: 0,
                n_spans: 0,
                kv_head: 0,
                first_head: 0,
                n_heads: shape.together as u32,
                mask,
                window,
                store: store.store,
                partial: 0,
                reserved: 0,
            };
            let bucket = store.class * 2 + usize::from(many);
            let mut spans = 0..0;
            for kv_head in 0..shape.kv_heads {
                if kv_head == 0 || matches!(segment.pages, PageSet::PerHead(_)) {
                    spans = self.visible_spans(segment.pages.head(kv_head), &seen);
                }
                let item = Item { kv_head: kv_head as u32, ..item };
                self.items_of_head(item, rows, spans.clone(), shape, per_item, bucket);
            }
        }
        self.rows = rows;
    }

    /// Adds the spans that anybody sees; gives their places.
    fn visible_spans(&mut self, pages: &[PageSpan], seen: &Range<u32>) -> Range<u32> {
        let first = self.spans.len() as u32;
        let visible = pages.iter().filter(|p| overlaps(p, seen));
        self.spans.extend(visible.map(|p| Span { page: p.page, position: p.start_pos, length: p.len }));
        first..self.spans.len() as u32
    }

    fn items_of_head(
        &mut self,
        item: Item,
        rows: &[u32],
        spans: Range<u32>,
        shape: GroupShape,
        per_item: usize,
        bucket: usize,
    ) {
        let groups = shape.heads / shape.together;
        for group in 0..groups {
            let list = item.kv_head as usize * groups + group;
            let first_head = (list * shape.together) as u32;
            for first_span in spans.clone().step_by(per_item) {
                let n_spans = (spans.end - first_span).min(per_item as u32);
                let partial = self.n_partials;
                self.buckets[bucket].push(Item { first_span, n_spans, first_head, partial, ..item });
                for (i, &row) in rows.iter().enumerate() {
                    let list = row as usize * shape.lists() + list;
                    self.listed.push((list as u32, partial + (i * shape.together) as u32));
                }
                self.n_partials += (rows.len() * shape.together) as u32;
            }
        }
    }

    /// Puts the items of all classes behind each other, and the partials into lists.
    fn finish(&mut self, lists: usize) {
        for bucket in &self.buckets {
            self.counts.push(Counts { first_item: self.items.len() as u32, n_items: bucket.len() as u32 });
            self.items.extend_from_slice(bucket);
        }
        self.first.resize(lists + 1, 0);
        for &(list, _) in &self.listed {
            self.first[list as usize + 1] += 1;
        }
        for list in 0..lists {
            self.first[list + 1] += self.first[list];
        }
        self.partials.resize(self.listed.len(), 0);
        // Filled from the back of each list; afterwards every start is where it belongs.
        for &(list, partial) in self.listed.iter().rev() {
            let end = &mut self.first[list as usize + 1];
            *end -= 1;
            self.partials[*end as usize] = partial;
        }
        self.first.rotate_left(1);
        if let Some(last) = self.first.last_mut() {
            *last = self.listed.len() as u32;
        }
    }
}

/// Whether a segment's rows go to the kernel for many, and how many of them are in an item.
fn rows_of_item(rows: usize, shape: GroupShape, store: StoreKernels) -> (bool, usize) {
    match rows * shape.together <= store.few_rows {
        true => (false, rows.max(1)),
        false => (true, (store.many_rows / shape.together).max(1)),
    }
}

/// Positions that any of the rows sees.
fn seen(step: &Step, segment: &Segment, rows: &[u32]) -> Range<u32> {
    let positions = rows.iter().map(|r| step.positions[*r as usize]);
    let (least, most) = positions.fold((u32::MAX, 0), |(lo, hi), p| (lo.min(p), hi.max(p)));
    segment.mask.visible(least).start..segment.mask.visible(most).end
}

fn overlaps(span: &PageSpan, seen: &Range<u32>) -> bool {
    span.len > 0 && span.start_pos < seen.end && u64::from(span.start_pos) + u64::from(span.len) > u64::from(seen.start)
}

/// Pages of an item, such that the items of a group fill the card about once.
fn pages_of_item(
    step: &Step,
    plan: &GroupPlan,
    shape: GroupShape,
    stores: &[Option<StoreKernels>],
    blocks: usize,
) -> usize {
    let mut pages = 0;
    for segment in &plan.segments {
        let Some(store) = stores[segment.store as usize] else { continue };
        let rows: usize = segment.queries.iter().map(ExactSizeIterator::len).sum();
        let (_, at_once) = rows_of_item(rows, shape, store);
        let bounds = segment.queries.iter().filter(|r| !r.is_empty()).flat_map(|r| [r.start, r.end.saturating_sub(1)]);
        let bounds: [u32; 2] = bounds.fold([u32::MAX, 0], |[lo, hi], r| [lo.min(r), hi.max(r)]);
        if rows == 0 {
            continue;
        }
        let seen = seen(step, segment, &bounds);
        let of_head = |head| segment.pages.head(head).iter().filter(|p| overlaps(p, &seen)).count();
        let heads: usize = match segment.pages {
            PageSet::All(_) => of_head(0) * shape.kv_heads,
            PageSet::PerHead(_) => (0..shape.kv_heads).map(of_head).sum(),
        };
        pages += heads * rows.div_ceil(at_once) * (shape.heads / shape.together);
    }
    pages.div_ceil(blocks.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use opencoti_compute::plan::{AppendRun, Residency};

    use super::*;

    fn segment(queries: Range<u32>, pages: Vec<PageSpan>, mask: Mask) -> Segment {
        Segment {
            queries: std::iter::once(queries).collect(),
            store: 0,
            pages: PageSet::All(pages),
            mask,
            rotation: QueryRotation::Own,
            residency: Residency::Device,
        }
    }

    fn fill(rows: u32, plan: GroupPlan, shape: GroupShape, blocks: usize) -> FlatGroup {
        let step = Step { tokens: vec![0; rows as usize], positions: (300..300 + rows).collect(), ..Step::default() };
        let store = StoreKernels { store: 0, class: 0, few_rows: 16, many_rows: 64 };
        let mut flat = FlatGroup::default();
        flat.fill(&step, &plan, shape, &[Some(store)], 1, blocks, &mut ExtraAngles::default());
        flat
    }

    fn pages(n: u32) -> Vec<PageSpan> {
        (0..n).map(|page| PageSpan { page, start_pos: page * 128, len: 128 }).collect()
    }

    #[test]
    fn a_decoded_row_reads_all_heads_of_a_group_at_once_and_its_pages_are_split_over_the_card() {
        let plan = GroupPlan { segments: vec![segment(0..1, pages(3), Mask::Causal)], ..GroupPlan::default() };
        let flat = fill(1, plan, GroupShape::new(2, 5), 6);
        assert_eq!(flat.items.len(), 6);
        assert!(flat.items.iter().all(|i| i.n_heads == 5 && i.n_spans == 1));
        assert_eq!(flat.counts, [Counts { first_item: 0, n_items: 6 }, Counts { first_item: 6, n_items: 0 }]);
        assert_eq!(flat.first, [0, 3, 6]);
        assert_eq!(flat.partials, [0, 5, 10, 15, 20, 25]);
        assert_eq!(flat.n_partials, 30);
    }

    #[test]
    fn pages_outside_every_window_are_not_read() {
        let plan = GroupPlan { segments: vec![segment(0..1, pages(3), Mask::Window(10))], ..GroupPlan::default() };
        let flat = fill(1, plan, GroupShape::new(1, 1), 1);
        assert_eq!(flat.spans, [Span { page: 2, position: 256, length: 128 }]);
    }

    #[test]
    fn many_rows_go_in_blocks_and_each_finds_its_partials() {
        let appends = vec![AppendRun { rows: 0..40, store: 0, page: 2, first_slot: 44 }];
        let segments = vec![segment(0..40, pages(3), Mask::Causal)];
        let plan = GroupPlan { appends, segments, ..GroupPlan::default() };
        let flat = fill(40, plan, GroupShape::new(1, 4), 1);
        assert_eq!(flat.appends[39], Append { row: 39, store: 0, page: 2, slot: 83 });
        assert_eq!(flat.counts[1].n_items, 3);
        assert_eq!(flat.items[2].n_queries, 8);
        assert_eq!(flat.first.len(), 41);
        for row in 0..40u32 {
            let item = flat.items[row as usize / 16];
            let list = flat.first[row as usize] as usize..flat.first[row as usize + 1] as usize;
            assert_eq!(flat.partials[list], [item.partial + row % 16 * 4]);
        }
    }

    #[test]
    fn an_empty_run_of_rows_reads_nothing() {
        let mut some = segment(0..2, pages(1), Mask::Full);
        some.queries.push(2..2);
        let nothing = segment(2..2, pages(1), Mask::Full);
        let flat =
            fill(2, GroupPlan { segments: vec![some, nothing], ..GroupPlan::default() }, GroupShape::new(1, 1), 1);
        assert_eq!((flat.items.len(), flat.partials.as_slice()), (1, [0, 1].as_slice()));
    }

    #[test]
    fn more_heads_than_a_block_has_rows_are_cut_evenly() {
        assert_eq!(GroupShape::new(1, 24).together, 12);
        assert_eq!(GroupShape::new(1, 24).lists(), 2);
    }
}
