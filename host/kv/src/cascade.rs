//! Cutting a batch's reads into segments, so that pages with several readers are read once for all of them.

use std::collections::HashMap;
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
        let key = |span: &Span| (span.store, sets.set_of(i, span));
        for run in reader.spans.chunk_by(|a, b| key(a) == key(b)) {
            let members = sets.members(key(&run[0]).1);
            // The first reader of a run lists it for all.
            if members[0] as usize == i {
                segments.push(Segment {
                    queries: join(members.iter().map(|&m| readers[m as usize].rows.clone())),
                    store: run[0].store,
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

/// Which readers read which span. Equal sets have equal numbers; set `i` below the number of readers is reader `i`
/// alone.
struct ReaderSets {
    sets: Vec<Vec<u32>>,
    by_span: HashMap<(u32, u32, u32), usize>,
}

impl ReaderSets {
    fn of(readers: &[Reader]) -> Self {
        let mut found =
            ReaderSets { sets: (0..readers.len() as u32).map(|i| vec![i]).collect(), by_span: HashMap::new() };
        for i in 0..readers.len() {
            let mut extended: HashMap<usize, usize> = HashMap::new();
            for span in readers[i].spans.iter().filter(|s| s.shared) {
                let sets = &mut found.sets;
                found
                    .by_span
                    .entry(key(span))
                    .and_modify(|set| {
                        *set = *extended.entry(*set).or_insert_with(|| {
                            let members = sets[*set].iter().copied().chain([i as u32]).collect();
                            sets.push(members);
                            sets.len() - 1
                        });
                    })
                    .or_insert(i);
            }
        }
        found
    }

    fn set_of(&self, reader: usize, span: &Span) -> usize {
        match span.shared {
            true => self.by_span[&key(span)],
            false => reader,
        }
    }

    fn members(&self, set: usize) -> &[u32] {
        &self.sets[set]
    }
}

fn key(span: &Span) -> (u32, u32, u32) {
    (span.store, span.page.page, span.page.len)
}
