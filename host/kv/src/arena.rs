//! The memory of a store, and how much memory there is.

use std::fs;
use std::path::Path;
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

/// Zeroed memory that stays where it is. Aligned to the system's pages.
///
/// The system backs it as it is touched; whoever makes an arena checks [`available_bytes`] first.
pub(crate) struct Arena {
    base: NonNull<u8>,
    len: usize,
    // Only unmapped on drop; all access goes through `base`.
    _map: MmapMut,
}

// SAFETY: plain memory; who may touch which byte when is the contract of the cache's plans.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(len: usize) -> std::io::Result<Self> {
        let mut map = MmapOptions::new().len(len.max(1)).map_anon()?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for the KV cache");
        }
        let base = NonNull::new(map.as_mut_ptr()).ok_or_else(|| std::io::Error::other("a mapping at address 0"))?;
        Ok(Arena { base, len, _map: map })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes `at .. at + len`.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(crate) unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: inside the mapping, which is initialised (zeroed); no writer by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// Bytes `at .. at + len`, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    pub(crate) unsafe fn bytes_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: inside the mapping; nobody else by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), len) }
    }
}

/// Bytes this process may still allocate, by the machine's free memory and the limit of its control group; `None` where
/// the system doesn't say.
pub fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    match (machine, control_group_available()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least that the version 2 control groups of this process, its own and those around it, still allow.
fn control_group_available() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::/"))?;
    Path::new(path).ancestors().filter_map(|group| group_available(&Path::new("/sys/fs/cgroup").join(group))).min()
}

/// Limit minus use of one control group, where cached file contents count as free; `None` without a limit.
fn group_available(group: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(group.join(file)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let cached = read("memory.stat")
        .and_then(|text| text.lines().find_map(|l| l.strip_prefix("file ")?.trim().parse::<u64>().ok()))
        .unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_free_memory_is_read_from_meminfo() {
        let text = "MemTotal:       16000000 kB\nMemFree:          100 kB\nMemAvailable:    8000 kB\n";
        assert_eq!(meminfo_available(text), Some(8_192_000));
        assert_eq!(meminfo_available("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn a_control_group_allows_its_limit_less_what_is_used_and_no_cache() {
        let group = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(group.path().join(file), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(group_available(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(group_available(group.path()), Some(300));
        write("memory.stat", "anon 100\nfile 500\n");
        assert_eq!(group_available(group.path()), Some(800));
    }

    #[test]
    fn an_arena_is_zeroed_and_aligned() {
        let mut arena = Arena::new(4096).unwrap();
        assert_eq!(arena.base().as_ptr() as usize % 64, 0);
        // SAFETY: nobody else knows this arena.
        unsafe {
            assert!(arena.bytes(0, 4096).iter().all(|&b| b == 0));
            arena.bytes_mut(10, 2).copy_from_slice(&[7, 8]);
            assert_eq!(arena.bytes(9, 4), [0, 7, 8, 0]);
        }
    }
}
