//! Counting of pages and planes: who refers to them, which are free, what is promised.
//!
//! An *entry* is a sequence's reference. Entries of running sequences are *live*; a unit that only idle sequences refer
//! to can be reclaimed by forgetting them.

/// References to one page or plane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    /// Entries that name it.
    pub(crate) refs: u32,
    /// Of these, entries of running sequences.
    pub(crate) live: u32,
}

/// A fixed number of pages or planes.
pub(crate) struct Pool {
    pub(crate) counts: Vec<Counts>,
    pub(crate) free: Vec<u32>,
    /// Units that only idle sequences hold.
    pub(crate) reclaimable: usize,
    /// Live entries, shared units counted for each.
    pub(crate) held: usize,
    /// Units promised to running sequences and not yet taken.
    pub(crate) promised: usize,
}

impl Pool {
    pub(crate) fn new(n: u32) -> Self {
        Pool {
            counts: vec![Counts::default(); n as usize],
            // Taken from the end: low numbers first.
            free: (0..n).rev().collect(),
            reclaimable: 0,
            held: 0,
            promised: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Units that running sequences use, shared ones counted once.
    pub(crate) fn used(&self) -> usize {
        self.len() - self.free.len() - self.reclaimable
    }

    /// Units that may go to anybody when every user pays for all that it holds.
    pub(crate) fn headroom_unshared(&self) -> usize {
        self.len().saturating_sub(self.held + self.promised)
    }

    /// Units that may go to anybody when a shared unit is paid once.
    pub(crate) fn headroom_shared(&self) -> usize {
        self.len().saturating_sub(self.used() + self.promised)
    }

    /// Takes a free unit for a running sequence.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let unit = self.free.pop()?;
        self.counts[unit as usize] = Counts { refs: 1, live: 1 };
        self.held += 1;
        Some(unit)
    }

    /// Adds a live entry.
    pub(crate) fn share(&mut self, unit: u32) {
        self.wake(unit);
        self.counts[unit as usize].refs += 1;
    }

    /// One live entry becomes idle.
    pub(crate) fn sleep(&mut self, unit: u32) {
        let counts = &mut self.counts[unit as usize];
        counts.live -= 1;
        self.held -= 1;
        if counts.live == 0 {
            self.reclaimable += 1;
        }
    }

    /// One idle entry becomes live.
    pub(crate) fn wake(&mut self, unit: u32) {
        let counts = &mut self.counts[unit as usize];
        if counts.live == 0 && counts.refs > 0 {
            self.reclaimable -= 1;
        }
        counts.live += 1;
        self.held += 1;
    }

    /// Drops an idle entry. Says how many entries are left; the unit is free when there is none.
    pub(crate) fn drop_idle(&mut self, unit: u32) -> u32 {
        let counts = &mut self.counts[unit as usize];
        counts.refs -= 1;
        if counts.refs == 0 {
            self.reclaimable -= 1;
            self.free.push(unit);
        }
        counts.refs
    }

    /// Frees a unit, whoever refers to it.
    pub(crate) fn clear(&mut self, unit: u32) {
        let counts = std::mem::take(&mut self.counts[unit as usize]);
        self.held -= counts.live as usize;
        if counts.live == 0 {
            self.reclaimable -= 1;
        }
        self.free.push(unit);
    }

    /// Drops a live entry; otherwise as [`Pool::drop_idle`].
    pub(crate) fn drop_live(&mut self, unit: u32) -> u32 {
        self.sleep(unit);
        self.drop_idle(unit)
    }
}
