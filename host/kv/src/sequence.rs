//! Sequences: tokens and page tables.

use std::collections::VecDeque;
use std::fmt;

use crate::error::KvError;
use crate::states::PlaneEntry;

/// Names a sequence. An id is never used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SeqId {
    pub(crate) index: u32,
    generation: u32,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// An entry of a page table: the first `len` slots of a page hold positions `start_pos ..`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageEntry {
    /// Index of the store.
    pub store: u32,
    /// Page in it.
    pub page: u32,
    /// Position of the token in slot 0.
    pub start_pos: u32,
    /// Slots that belong to the sequence.
    pub len: u32,
}

impl PageEntry {
    /// First position after it.
    pub fn end(&self) -> u32 {
        self.start_pos + self.len
    }
}

/// Pages of one sequence in one group, by position and without gaps; windows drop them at the front.
pub(crate) type Table = VecDeque<PageEntry>;

/// First position that a table holds.
pub(crate) fn first_held(table: &Table) -> u32 {
    table.front().map_or(0, |e| e.start_pos)
}

/// What a sequence was promised in one store.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Promise {
    /// Pages promised.
    pub(crate) quota: usize,
    /// Pages taken of them.
    pub(crate) drawn: usize,
}

impl Promise {
    /// Pages not yet taken.
    pub(crate) fn open(&self) -> usize {
        self.quota.saturating_sub(self.drawn)
    }
}

/// What a sequence is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// It has an owner who appends to it.
    Live,
    /// Nobody uses it; it may be evicted.
    Idle,
    /// Released while a step wrote it; goes when the step ends.
    Doomed,
}

pub(crate) struct Sequence {
    /// Tokens, those of a planned step included.
    pub(crate) tokens: Vec<u32>,
    /// Of these, tokens whose keys and values are written.
    pub(crate) committed: usize,
    /// A table for each group.
    pub(crate) tables: Vec<Table>,
    /// A promise for each store.
    pub(crate) promises: Vec<Promise>,
    /// A promise for each store's stage.
    pub(crate) stage_promises: Vec<Promise>,
    /// Whether it holds on to exact tokens that what follows it would read. An idle sequence may have to give them up.
    pub(crate) exact: bool,
    /// Planes of recurrent state, ascending: that after all written tokens and, while it runs, those to which it can be
    /// taken back. Empty in a cache without state.
    pub(crate) planes: VecDeque<PlaneEntry>,
    /// Planes that the planned step writes.
    pub(crate) writing: Vec<PlaneEntry>,
    /// Planes promised, those it has included.
    pub(crate) plane_quota: usize,
    /// Positions at which snapshots are wanted, ascending.
    pub(crate) wishes: Vec<u32>,
    /// Kept at a chosen position of another sequence.
    pub(crate) is_snapshot: bool,
    /// Others begin with all of it, so that it is forked and not taken over while there is room for that.
    pub(crate) is_kept: bool,
    /// How often another sequence began with it.
    pub(crate) hits: u64,
    pub(crate) phase: Phase,
    /// Part of the planned step.
    pub(crate) in_flight: bool,
    /// When it was used last, in the cache's own clock.
    pub(crate) last_used: u64,
}

/// All sequences by id.
#[derive(Default)]
pub(crate) struct Sequences {
    places: Vec<(u32, Option<Sequence>)>,
    free: Vec<u32>,
}

impl Sequences {
    pub(crate) fn insert(&mut self, sequence: Sequence) -> SeqId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.1 = Some(sequence);
        SeqId { index, generation: place.0 }
    }

    pub(crate) fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        let place = self.places.get_mut(id.index as usize).filter(|p| p.0 == id.generation)?;
        let sequence = place.1.take()?;
        // A place whose generations are used up is not used again.
        if let Some(next) = place.0.checked_add(1) {
            place.0 = next;
            self.free.push(id.index);
        }
        Some(sequence)
    }

    pub(crate) fn get(&self, id: SeqId) -> Result<&Sequence, KvError> {
        let place = self.places.get(id.index as usize).filter(|p| p.0 == id.generation);
        place.and_then(|p| p.1.as_ref()).ok_or(KvError::UnknownSequence(id))
    }

    pub(crate) fn get_mut(&mut self, id: SeqId) -> Result<&mut Sequence, KvError> {
        let place = self.places.get_mut(id.index as usize).filter(|p| p.0 == id.generation);
        place.and_then(|p| p.1.as_mut()).ok_or(KvError::UnknownSequence(id))
    }

    /// The sequence at a place.
    pub(crate) fn at(&self, index: u32) -> Option<&Sequence> {
        self.places.get(index as usize)?.1.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SeqId, &Sequence)> {
        self.places.iter().enumerate().filter_map(|(i, (generation, sequence))| {
            let id = SeqId { index: i as u32, generation: *generation };
            sequence.as_ref().map(|s| (id, s))
        })
    }
}
