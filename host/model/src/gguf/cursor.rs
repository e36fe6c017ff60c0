//! A bounds-checked little-endian reader over the bytes of one file.

use std::fmt::Display;

use super::GgufError;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    file: &'a str,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], file: &'a str) -> Self {
        Cursor { bytes, pos: 0, file }
    }

    pub(super) fn file(&self) -> &'a str {
        self.file
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.pos
    }

    /// The next `n` bytes. `what` names them in the error.
    pub(super) fn take(&mut self, n: u64, what: &dyn Display) -> Result<&'a [u8], GgufError> {
        match usize::try_from(n).ok().filter(|&n| n <= self.remaining()) {
            Some(n) => {
                let taken = &self.bytes[self.pos..self.pos + n];
                self.pos += n;
                Ok(taken)
            }
            None => Err(self.truncated(n, what)),
        }
    }

    fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N], GgufError> {
        let taken = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(taken);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &dyn Display) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &dyn Display) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: 64-bit length, then that many bytes, whatever they hold.
    pub(super) fn string_bytes(&mut self, what: &dyn Display) -> Result<&'a [u8], GgufError> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// Refuses a count of things that cannot fit into what is left of the file, each taking at least `min_bytes`.
    /// What it lets through is safe to reserve memory for.
    pub(super) fn check_count(&self, count: u64, min_bytes: usize, what: &dyn Display) -> Result<usize, GgufError> {
        let needed = count.saturating_mul(min_bytes as u64);
        match usize::try_from(count) {
            Ok(count) if needed <= self.remaining() as u64 => Ok(count),
            _ => Err(self.truncated(needed, what)),
        }
    }

    fn truncated(&self, needed: u64, what: &dyn Display) -> GgufError {
        GgufError::Truncated {
            file: self.file.to_owned(),
            what: what.to_string(),
            offset: self.pos,
            needed,
            len: self.bytes.len(),
        }
    }
}
