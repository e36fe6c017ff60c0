//! Cutting a batch's reads into segments, so that pages with several readers are read once for all of them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use opencoti_compute::plan::{Mask, PageSet, PageSpan, QueryRotation, Residency, Segment};

/// Pages that the rows of one sequence read.
pub(crate) struct Reader {
    pub(crate) rows: Range<u32>,
    pub(crate) spans: Vec<Span>,
}

/// A run of slots in one store.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) store: u32,
    pub(crate) page: PageSpan,
    /// Whether other sequences may read the page too.
    pub(crate) shared: bool,
}

/// Segments in which every reader meets each of its spans once. Consecutive spans with the same readers make one
/// segment; a page that is read to different lengths is read apart.
pub(crate) fn segments(readers: &[Reader], mask: Mask) -> Vec<Segment> {
    let sets = ReaderSets::of(readers);
    let mut segments = Vec::new();
    for (i, reader) in readers.iter().enumerate() {
        let mut rest = &reader.spans[..];
        while let Some(first) = rest.first() {
            let set = sets.set_of(i, first);
            let same = |s: &&Span| s.store == first.store && sets.set_of(i, s) == set;
            let (run, after) = rest.split_at(1 + rest[1..].iter().take_while(same).count());
            rest = after;
            // The first reader of a run lists it for all.
            let members = &sets.members[set as usize];
            if members[0] as usize == i {
                segments.push(Segment {
                    queries: join(members.iter().map(|&m| readers[m as usize].rows.clone())),
                    store: first.store,
                    pages: PageSet::All(run.iter().map(|s| s.page).collect()),
                    mask,
                    rotation: QueryRotation::Own,
                    residency: Residency::Device,
                });
            }
        }
    }
    segments
}

/// Ranges in order, adjacent ones made one.
fn join(ranges: impl Iterator<Item = Range<u32>>) -> Vec<Range<u32>> {
    let mut joined: Vec<Range<u32>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Which readers read which span.
struct ReaderSets {
    /// Readers of each set, ascending. Set `i` below the number of readers is reader `i` alone.
    members: Vec<Vec<u32>>,
    /// The set of each span that more than one reader may read.
    by_span: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
}

impl ReaderSets {
    fn of(readers: &[Reader]) -> Self {
        let mut members: Vec<Vec<u32>> = (0..readers.len() as u32).map(|i| vec![i]).collect();
        let mut by_span: HashMap<u64, u32, _> = HashMap::default();
        for (i, reader) in readers.iter().enumerate() {
            // What each set becomes with this reader. Neighbours mostly come from the same set.
            let mut grown: Vec<(u32, u32)> = Vec::new();
            for span in reader.spans.iter().filter(|s| s.shared) {
                let Some(set) = by_span.get_mut(&key(span)) else {
                    by_span.insert(key(span), i as u32);
                    continue;
                };
                let known = grown.iter().rev().find(|(from, _)| from == set);
                *set = known.map(|&(_, to)| to).unwrap_or_else(|| {
                    let to = members.len() as u32;
                    members.push(members[*set as usize].iter().copied().chain([i as u32]).collect());
                    grown.push((*set, to));
                    to
                });
            }
        }
        ReaderSets { members, by_span }
    }

    fn set_of(&self, reader: usize, span: &Span) -> u32 {
        match span.shared {
            true => self.by_span[&key(span)],
            false => reader as u32,
        }
    }
}

/// A span as one number: 24 bits of store, 32 of page, 8 of length.
fn key(span: &Span) -> u64 {
    debug_assert!(span.store < 1 << 24 && span.page.len < 1 << 8);
    u64::from(span.store) << 40 | u64::from(span.page.page) << 8 | u64::from(span.page.len)
}

/// Hashes keys of spans, thousands in a step, by one multiplication (Fibonacci hashing).
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(self.0 ^ u64::from(b)));
    }

    fn write_u64(&mut self, key: u64) {
        let product = u128::from(key) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(row: u32, pages: &[(u32, u32)]) -> Reader {
        let span = |(i, &(page, len)): (usize, &(u32, u32))| Span {
            store: 0,
            page: PageSpan { page, start_pos: i as u32 * 128, len },
            shared: true,
        };
        Reader { rows: row..row + 1, spans: pages.iter().enumerate().map(span).collect() }
    }

    fn text(readers: &[Reader]) -> Vec<String> {
        segments(readers, Mask::Causal).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tree_of_prefixes_is_read_branch_by_branch() {
        let readers = [
            reader(0, &[(1, 128), (2, 128), (3, 128)]),
            reader(1, &[(1, 128), (2, 128), (4, 128)]),
            reader(2, &[(1, 128), (5, 128)]),
        ];
        assert_eq!(
            text(&readers),
            [
                "read  rows 0..3 store 0 [p1@0+128] causal",
                "read  rows 0..2 store 0 [p2@128+128] causal",
                "read  rows 0..1 store 0 [p3@256+128] causal",
                "read  rows 1..2 store 0 [p4@256+128] causal",
                "read  rows 2..3 store 0 [p5@128+128] causal",
            ]
        );
    }

    #[test]
    fn readers_that_do_not_stand_beside_each_other_share_too() {
        let readers = [reader(0, &[(1, 128)]), reader(1, &[(2, 128)]), reader(2, &[(1, 128)])];
        assert_eq!(text(&readers)[0], "read  rows 0..1,2..3 store 0 [p1@0+128] causal");
    }

    #[test]
    fn a_page_read_to_two_lengths_is_read_for_each() {
        let readers = [reader(0, &[(1, 128)]), reader(1, &[(1, 40)]), reader(2, &[(1, 40)])];
        assert_eq!(
            text(&readers),
            ["read  rows 0..1 store 0 [p1@0+128] causal", "read  rows 1..3 store 0 [p1@0+40] causal"]
        );
    }
}
