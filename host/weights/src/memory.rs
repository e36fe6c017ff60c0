//! Memory of packed weights: one mapping for all of them, in huge pages where the system has them.
//!
//! A token reads every weight once; with pages of 4 KiB a processor would look up a page for each few rows, and its
//! prefetchers stop at the end of each.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

/// Bytes of a cache line, by which blocks are aligned.
pub const LINE: usize = 64;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// A mapping that is given away block by block.
pub struct Arena {
    map: Arc<MmapRaw>,
    next: usize,
}

impl Arena {
    /// Zeroed memory for blocks of `bytes` together, each rounded up to [`LINE`].
    ///
    /// # Errors
    /// When the system has no address space for it.
    pub fn new(bytes: usize) -> std::io::Result<Arena> {
        let len = bytes.checked_add(HUGE_PAGE).ok_or_else(|| std::io::Error::other("no such size"))?;
        let map = MmapOptions::new().len(len).map_anon()?;
        // Without huge pages everything works, a little slower; not every system can say which it gives.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let map = MmapRaw::from(map);
        let next = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Arena { map: Arc::new(map), next })
    }

    /// The next `bytes` bytes, which must be left.
    pub fn take(&mut self, bytes: usize) -> Block {
        let start = self.next;
        self.next += bytes.next_multiple_of(LINE);
        assert!(self.next <= self.map.len(), "an arena is made for its blocks");
        Block { map: Arc::clone(&self.map), start, len: bytes }
    }
}

/// A part of an [`Arena`], aligned to [`LINE`].
pub struct Block {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: inside the mapping, which `map` keeps; blocks of an arena are disjoint.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start), self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the only other way to these bytes is through this block.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeroed_apart_and_aligned() {
        let mut arena = Arena::new(200).unwrap();
        let (mut a, mut b) = (arena.take(100), arena.take(64));
        assert!(a.iter().chain(b.iter()).all(|v| *v == 0));
        assert!([&a, &b].iter().all(|block| block.as_ptr().addr().is_multiple_of(LINE)));
        a.fill(1);
        b.fill(2);
        drop(arena);
        assert!(a.len() == 100 && a.iter().all(|v| *v == 1) && b.iter().all(|v| *v == 2));
    }
}
