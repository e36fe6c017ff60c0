//! Recurrent state: planes beside the pages.
//!
//! A *plane* is everything the recurrent layers of a model keep of one sequence after a number of its tokens. Like a
//! page it never changes once it is written: a step reads the plane with which it begins and writes new ones. A
//! sequence therefore goes on by exchanging planes, shares one by a reference, and is taken back by choosing an earlier
//! one. No codec ever sees a plane.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use opencoti_compute::plan::StateView;

use crate::arena::Arena;
use crate::config::{CacheConfig, StateConfig};
use crate::error::{CacheFull, ConfigError};
use crate::pool::Pool;

/// Name of the store in messages.
pub(crate) const STATE: &str = "state";

/// The plane of a sequence after its first `at` tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlaneEntry {
    pub(crate) at: u32,
    pub(crate) plane: u32,
}

/// An arena of planes.
pub(crate) struct StateStore {
    pub(crate) view: StateView,
    pub(crate) pool: Pool,
    /// Planes that a running sequence has at most, those of a step being run included.
    pub(crate) quota: usize,
    /// Of the tokens last written, so many can be taken back.
    pub(crate) rollback: usize,
    arena: Arena,
}

impl StateStore {
    /// The store of a model with recurrent layers, `None` for any other.
    pub(crate) fn new(config: &CacheConfig) -> Result<Option<Self>, ConfigError> {
        let states = &config.states;
        if states.layers.is_empty() {
            return Ok(None);
        }
        let size = config.state_size()?;
        let too_large = || ConfigError::TooLarge { group: STATE.to_owned() };
        let n_planes = u32::try_from(size.n_planes).map_err(|_| too_large())?;
        let bytes = usize::try_from(size.bytes()).ok().filter(|&b| isize::try_from(b).is_ok()).ok_or_else(too_large)?;
        let arena = Arena::new(bytes).map_err(|e| ConfigError::Refused {
            group: STATE.to_owned(),
            asked: bytes as u64,
            reason: e.to_string(),
        })?;
        Ok(Some(StateStore {
            view: StateView {
                base: arena.base().cast(),
                plane_words: size.plane_bytes / size_of::<f32>(),
                n_planes: size.n_planes,
            },
            pool: Pool::new(n_planes),
            quota: states.quota(),
            rollback: states.rollback,
            arena,
        }))
    }

    /// Planes that may go to anybody: neither held by a running sequence nor promised to one. Every running sequence
    /// pays for all that it holds, since sharing ends with the next token.
    pub(crate) fn headroom(&self) -> usize {
        self.pool.headroom_unshared()
    }

    /// An error that says that `planes` more than the headroom were needed.
    pub(crate) fn full(&self, planes: usize) -> CacheFull {
        CacheFull { store: STATE.to_owned(), unit: "states", asked: planes, free: self.headroom() }
    }

    /// Positions after which a step must write a plane when it brings a sequence from `now` to `end` tokens: the last
    /// one, and those to which it can be taken back.
    pub(crate) fn written(&self, now: u32, end: u32) -> RangeInclusive<u32> {
        end.saturating_sub(self.rollback as u32).max(now + 1)..=end
    }

    /// Whether a sequence of `now` tokens that is to have `end` of them needs its plane at `at`.
    pub(crate) fn needs(&self, at: u32, now: u32, end: u32) -> bool {
        at == now || u64::from(at) + self.rollback as u64 >= u64::from(end)
    }

    /// Drops those planes of a running sequence of `now` tokens that it does not need on its way to `end` of them.
    pub(crate) fn keep_live(&mut self, planes: &mut VecDeque<PlaneEntry>, now: u32, end: u32) {
        while let Some(first) = planes.front().filter(|p| !self.needs(p.at, now, end)) {
            self.pool.drop_live(first.plane);
            planes.pop_front();
        }
    }

    /// Bytes of a plane.
    pub(crate) fn plane_size(&self) -> usize {
        self.view.plane_words * size_of::<f32>()
    }

    /// A plane's bytes.
    ///
    /// # Safety
    /// No executor writes the plane while the slice lives.
    pub(crate) unsafe fn plane_bytes(&self, plane: u32) -> &[u8] {
        let len = self.plane_size();
        // SAFETY: passed on.
        unsafe { self.arena.bytes(plane as usize * len, len) }
    }

    /// A plane's bytes, to fill a plane that was just taken.
    ///
    /// # Safety
    /// Nobody reads or writes the plane while the slice lives.
    pub(crate) unsafe fn plane_bytes_mut(&mut self, plane: u32) -> &mut [u8] {
        let len = self.plane_size();
        // SAFETY: passed on.
        unsafe { self.arena.bytes_mut(plane as usize * len, len) }
    }
}

impl StateConfig {
    /// Planes of one running sequence: the one it begins a step with, and those that the step writes.
    pub(crate) fn quota(&self) -> usize {
        self.rollback.saturating_add(2)
    }
}
