//! State files: a sequence's tokens and pages, to go on with later or elsewhere.
//!
//! A file is *prefix, header, digest of both, pages, digest of the pages*. The header says what model, geometry and
//! codecs the pages belong to ([`header`]); it and the file's length are checked, and the digest of the pages too,
//! before a page is taken. Pages are stored whole, as the codecs laid them out, each group's in order of position: a
//! page that is not full therefore carries whatever its other slots hold.

mod header;

use std::io::{self, Read, Seek, SeekFrom, Write};

use opencoti_plugin_api::PAGE_TOKENS;
use sha2::{Digest, Sha256};

use crate::cache::Cache;
use crate::error::KvError;
use crate::sequence::{PageEntry, SeqId};
use header::{Header, Shape};

/// First bytes of every state file.
const MAGIC: [u8; 8] = *b"ocotikv\n";
/// Version of the format.
const VERSION: u32 = 1;
/// Magic, version and length of the header.
const PREFIX_BYTES: usize = 8 + 4 + 8;
/// A SHA-256 digest.
const DIGEST_BYTES: usize = 32;

/// Which model a state belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelFingerprint {
    /// Name for messages.
    pub name: String,
    /// Digest of whatever decides what keys and values mean: weights and hyperparameters.
    pub digest: [u8; 32],
}

/// Why a state was not saved or restored. The cache is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading or writing failed.
    #[error("the state file could not be read or written: {0}")]
    Io(#[from] io::Error),
    /// Something else.
    #[error("the file is no state file: it does not begin with the mark of one")]
    NotAState,
    /// A format of another time.
    #[error("the state file has format version {found}, this server reads version {VERSION}; save the state again")]
    Version {
        /// Version of the file.
        found: u32,
    },
    /// Too short or too long.
    #[error("the state file is {found} bytes long, expected {expected}: it was cut short or changed")]
    Length {
        /// Bytes it has.
        found: u64,
        /// Bytes that its beginning announces, at least.
        expected: u64,
    },
    /// A digest that does not fit.
    #[error("the {part} of the state file is damaged: its digest differs from what was written")]
    Damaged {
        /// Header or pages.
        part: &'static str,
    },
    /// A header that no server writes.
    #[error("the header of the state file makes no sense: {0}")]
    Malformed(&'static str),
    /// Another model, codec or geometry.
    #[error("the state file was written with {what} {found}, this server has {expected}")]
    Mismatch {
        /// What differs.
        what: String,
        /// What the file says.
        found: String,
        /// What is needed.
        expected: String,
    },
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] KvError),
}

impl Cache {
    /// Writes the committed tokens of a sequence and their pages; windowed groups write what they still hold. Returns
    /// the number of bytes. Not while a step is running.
    pub fn save(&self, seq: SeqId, out: &mut impl Write, model: &ModelFingerprint) -> Result<u64, StateError> {
        if self.pending.is_some() {
            return Err(KvError::StepPending.into());
        }
        let sequence = self.sequences.get(seq)?;
        let header = Header {
            model: model.clone(),
            shape: Shape::of(&self.config, &self.stores),
            tokens: sequence.tokens.clone(),
            tables: sequence.tables.iter().map(|t| t.iter().map(|e| (e.start_pos, e.len)).collect()).collect(),
        }
        .encode();
        let mut front = Vec::with_capacity(PREFIX_BYTES + header.len());
        front.extend_from_slice(&MAGIC);
        front.extend_from_slice(&VERSION.to_le_bytes());
        front.extend_from_slice(&(header.len() as u64).to_le_bytes());
        front.extend_from_slice(&header);
        out.write_all(&front)?;
        out.write_all(&Sha256::digest(&front))?;

        let mut digest = Sha256::new();
        let mut written = (front.len() + 2 * DIGEST_BYTES) as u64;
        for entry in sequence.tables.iter().flatten() {
            // SAFETY: no step is running, so no executor writes.
            let page = unsafe { self.stores[entry.store as usize].page_bytes(entry.page) };
            digest.update(page);
            out.write_all(page)?;
            written += page.len() as u64;
        }
        out.write_all(&digest.finalize())?;
        out.flush()?;
        Ok(written)
    }

    /// Makes a running sequence of a state file. Everything is checked before a page is taken: the model, the format,
    /// geometry and codecs, the length, and the digests. Idle sequences are evicted when pages are short.
    pub fn restore(&mut self, file: &mut (impl Read + Seek), model: &ModelFingerprint) -> Result<SeqId, StateError> {
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        let header = read_header(file, length)?;
        header.check_model(model)?;
        header.shape.check(&Shape::of(&self.config, &self.stores))?;
        self.check_tables(&header)?;
        let pages_at = file.stream_position()?;
        let page_bytes = self.payload(&header).ok_or(StateError::Malformed("its pages are beyond any memory"))?;
        let expected = page_bytes.checked_add(pages_at + DIGEST_BYTES as u64);
        let expected = expected.ok_or(StateError::Malformed("its pages are beyond any memory"))?;
        if length != expected {
            return Err(StateError::Length { found: length, expected });
        }
        check_payload(file, page_bytes)?;

        let needs: Vec<(usize, usize)> = self.active.iter().copied().zip(header.tables.iter().map(Vec::len)).collect();
        for &(store, pages) in &needs {
            let store = &self.stores[store];
            if pages > store.headroom() {
                return Err(KvError::from(store.full(pages)).into());
            }
        }
        self.evict_for(&needs)?;
        file.seek(SeekFrom::Start(pages_at))?;
        let seq = self.create();
        match self.fill(seq, header, file) {
            Ok(()) => Ok(seq),
            Err(error) => self.release(seq).map_err(StateError::from).and(Err(error)),
        }
    }

    /// Whether the tables of a header belong to its tokens and reach back as far as windows need.
    fn check_tables(&self, header: &Header) -> Result<(), StateError> {
        let n = header.tokens.len();
        for (group, table) in header.tables.iter().enumerate() {
            let first = table.first().map_or(0, |&(start, _)| start);
            let mut position = first;
            for &(start, len) in table {
                if start != position || len == 0 || len as usize > PAGE_TOKENS {
                    return Err(StateError::Malformed("its pages do not follow each other"));
                }
                position = start.checked_add(len).ok_or(StateError::Malformed("its positions exceed 32 bits"))?;
            }
            if position as usize != n {
                return Err(StateError::Malformed("its pages and its tokens do not end together"));
            }
            if !self.reaches_back(group, first, n) {
                return Err(StateError::Malformed("its pages do not reach back far enough to go on"));
            }
        }
        Ok(())
    }

    /// Bytes of all pages of a header.
    fn payload(&self, header: &Header) -> Option<u64> {
        let mut bytes = 0u64;
        for (table, &store) in header.tables.iter().zip(&self.active) {
            let page = self.stores[store].view.page_bytes as u64;
            bytes = bytes.checked_add(page.checked_mul(table.len() as u64)?)?;
        }
        Some(bytes)
    }

    /// Takes pages for an empty sequence and reads them.
    fn fill(&mut self, seq: SeqId, header: Header, file: &mut impl Read) -> Result<(), StateError> {
        let mut digest = Sha256::new();
        for (group, spans) in header.tables.iter().enumerate() {
            let index = self.active[group];
            for &(start_pos, len) in spans {
                let store = &mut self.stores[index];
                let page = store.take(seq.index).ok_or_else(|| KvError::from(store.full(1)))?;
                // In the table before it is read, so that releasing the sequence gives it back.
                let entry = PageEntry { store: index as u32, page, start_pos, len };
                self.sequences.get_mut(seq)?.tables[group].push_back(entry);
                // SAFETY: the page was just taken; no plan names it.
                let bytes = unsafe { store.page_bytes_mut(page) };
                file.read_exact(bytes)?;
                digest.update(&*bytes);
            }
        }
        // The file may have changed since it was checked.
        check_digest(digest, file, "pages")?;
        let sequence = self.sequences.get_mut(seq)?;
        sequence.committed = header.tokens.len();
        sequence.tokens = header.tokens;
        Ok(())
    }
}

/// Reads prefix and header, which are never larger than the file.
fn read_header(file: &mut impl Read, length: u64) -> Result<Header, StateError> {
    let fixed = (PREFIX_BYTES + 2 * DIGEST_BYTES) as u64;
    let mut prefix = [0u8; PREFIX_BYTES];
    if length < fixed {
        let mut magic = [0u8; MAGIC.len()];
        return match file.read_exact(&mut magic) {
            Ok(()) if magic == MAGIC => Err(StateError::Length { found: length, expected: fixed }),
            _ => Err(StateError::NotAState),
        };
    }
    file.read_exact(&mut prefix)?;
    let (magic, rest) = prefix.split_at(MAGIC.len());
    let (version, header_bytes) = rest.split_at(4);
    if magic != MAGIC {
        return Err(StateError::NotAState);
    }
    let version = u32::from_le_bytes(version.try_into().expect("four bytes"));
    if version != VERSION {
        return Err(StateError::Version { found: version });
    }
    let header_bytes = u64::from_le_bytes(header_bytes.try_into().expect("eight bytes"));
    let expected = header_bytes.saturating_add(fixed);
    if length < expected {
        return Err(StateError::Length { found: length, expected });
    }
    let mut header = vec![0u8; header_bytes as usize];
    file.read_exact(&mut header)?;
    let mut digest = Sha256::new();
    digest.update(prefix);
    digest.update(&header);
    check_digest(digest, file, "header")?;
    Header::decode(&header)
}

/// Reads `bytes` bytes of pages and compares their digest.
fn check_payload(file: &mut impl Read, bytes: u64) -> Result<(), StateError> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0u8; 64 << 10];
    let mut left = bytes;
    while left > 0 {
        let n = left.min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..n])?;
        digest.update(&buffer[..n]);
        left -= n as u64;
    }
    check_digest(digest, file, "pages")
}

/// Reads a digest and compares it.
fn check_digest(found: Sha256, file: &mut impl Read, part: &'static str) -> Result<(), StateError> {
    let mut expected = [0u8; DIGEST_BYTES];
    file.read_exact(&mut expected)?;
    match found.finalize()[..] == expected {
        true => Ok(()),
        false => Err(StateError::Damaged { part }),
    }
}
