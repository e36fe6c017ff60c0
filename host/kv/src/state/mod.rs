//! State files: a sequence's tokens, pages and recurrent state, to go on with later or elsewhere.
//!
//! A file is *prefix, header, digest of both, contents, digest of the contents*. The header says what model, geometry
//! and codecs the contents belong to ([`header`]), and of each page whether its record, its exact tokens or both follow; it and the file's length are checked, and the digest of the contents
//! too, before a page is taken. The contents are pages as the codecs laid them out, each group's in order, and then one
//! plane for each member: the sequence, and the snapshots that are its beginnings. Without these a restored prompt
//! could not be reused where state or windows allow it nowhere else. Slots of a page that no member fills are
//! overwritten in the file, so that it holds nothing of anybody else's tokens.

mod header;
mod restore;

use std::collections::HashMap;
use std::io::{self, Write};

use opencoti_compute::plan::StoreView;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use sha2::{Digest, Sha256};

use crate::arena::Arena;
use crate::cache::Cache;
use crate::error::KvError;
use crate::sequence::{SeqId, Sequence};
use crate::stage::Record;
use crate::store::Store;
use header::{EXACT, FilePage, Header, Member, RECORD, Shape, Span};

/// First bytes of every state file.
const MAGIC: [u8; 8] = *b"ocotikv\n";
/// Version of the format.
const VERSION: u32 = 3;
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
        /// Header or contents.
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
    /// A codec that did not overwrite the unused slots of a page.
    #[error("codec `{codec}` could not clear the unused part of a page: {reason}")]
    Codec {
        /// Name of the codec.
        codec: String,
        /// What it said.
        reason: String,
    },
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] KvError),
}

impl Cache {
    /// Writes the committed tokens of a sequence, their pages and state, and the snapshots that are its beginnings;
    /// windowed groups write what they still hold. Returns the number of bytes. Not while a step is running.
    pub fn save(&self, seq: SeqId, out: &mut impl Write, model: &ModelFingerprint) -> Result<u64, StateError> {
        if self.pending.is_some() {
            return Err(KvError::StepPending.into());
        }
        let members = self.family(seq)?;
        let mut pages = vec![FilePages::default(); self.active.len()];
        let header = Header {
            model: model.clone(),
            shape: Shape::of(&self.config, &self.stores),
            tokens: members[0].tokens.clone(),
            members: members.iter().map(|m| member(m, &mut pages)).collect(),
            pages: pages.iter().zip(&self.active).map(|(p, &store)| p.describe(&self.stores[store])).collect(),
        }
        .encode();
        let mut front = Vec::with_capacity(PREFIX_BYTES + header.len());
        front.extend_from_slice(&MAGIC);
        front.extend_from_slice(&VERSION.to_le_bytes());
        front.extend_from_slice(&(header.len() as u64).to_le_bytes());
        front.extend_from_slice(&header);
        out.write_all(&front)?;
        out.write_all(&Sha256::digest(&front))?;

        let mut contents = Contents { out, digest: Sha256::new(), bytes: 0 };
        for (pages, &store) in pages.iter().zip(&self.active) {
            contents.pages(&self.stores[store], pages)?;
        }
        if let Some(states) = &self.states {
            for plane in members.iter().filter_map(|m| m.planes.back()) {
                // SAFETY: no step is running, so no executor writes.
                contents.write(unsafe { states.plane_bytes(plane.plane) })?;
            }
        }
        let Contents { out, digest, bytes } = contents;
        out.write_all(&digest.finalize())?;
        out.flush()?;
        Ok((front.len() + 2 * DIGEST_BYTES) as u64 + bytes)
    }

    /// A sequence, and by their length the snapshots that are its beginnings.
    fn family(&self, seq: SeqId) -> Result<Vec<&Sequence>, KvError> {
        let sequence = self.sequences.get(seq)?;
        let begins = |s: &Sequence| {
            s.is_snapshot && s.tokens.len() < sequence.tokens.len() && sequence.tokens.starts_with(&s.tokens)
        };
        let mut members: Vec<&Sequence> = self.idle().map(|(_, s)| s).filter(|s| begins(s)).collect();
        members.sort_unstable_by_key(|s| s.tokens.len());
        members.dedup_by_key(|s| s.tokens.len());
        members.insert(0, sequence);
        Ok(members)
    }
}

/// Pages of a group, in the order in which they are written.
#[derive(Clone, Default)]
struct FilePages {
    pages: Vec<u32>,
    /// Slots of each that are filled.
    filled: Vec<u32>,
    index: HashMap<u32, u32>,
}

impl FilePages {
    /// What the header says of them.
    fn describe(&self, store: &Store) -> Vec<FilePage> {
        let part = |(&page, &filled): (&u32, &u32)| FilePage { filled, parts: parts(store, page) };
        self.pages.iter().zip(&self.filled).map(part).collect()
    }

    /// Place of a page of which `len` slots are needed.
    fn place(&mut self, page: u32, len: u32) -> u32 {
        let place = *self.index.entry(page).or_insert(self.pages.len() as u32);
        if place as usize == self.pages.len() {
            self.pages.push(page);
            self.filled.push(0);
        }
        let filled = &mut self.filled[place as usize];
        *filled = len.max(*filled);
        place
    }
}

fn member(sequence: &Sequence, pages: &mut [FilePages]) -> Member {
    let tables = sequence.tables.iter().zip(pages).map(|(table, pages)| {
        let span =
            |e: &crate::sequence::PageEntry| Span { page: pages.place(e.page, e.len), start: e.start_pos, len: e.len };
        table.iter().map(span).collect()
    });
    Member { n_tokens: sequence.tokens.len() as u32, tables: tables.collect() }
}

/// What follows the header.
struct Contents<'a, W: Write> {
    out: &'a mut W,
    digest: Sha256,
    bytes: u64,
}

impl<W: Write> Contents<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        self.digest.update(bytes);
        self.out.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn pages(&mut self, store: &Store, pages: &FilePages) -> Result<(), StateError> {
        for (&page, &filled) in pages.pages.iter().zip(&pages.filled) {
            let parts = parts(store, page);
            if parts & RECORD != 0 {
                // SAFETY: no step is running, so no executor writes.
                self.page(unsafe { store.page_bytes(page) }, &store.view, store.n_kv_heads, filled)?;
            }
            if let Some((stage, unit)) = store.stage.as_ref().zip(store.pages[page as usize].stage) {
                // SAFETY: as above.
                self.page(unsafe { stage.page_bytes(unit) }, &stage.view, store.n_kv_heads, filled)?;
            }
        }
        Ok(())
    }

    /// Writes a page of which `filled` slots are needed.
    fn page(&mut self, bytes: &[u8], view: &StoreView, n_kv_heads: usize, filled: u32) -> Result<(), StateError> {
        if filled as usize == PAGE_TOKENS {
            return self.write(bytes);
        }
        let mut copy = Arena::new(bytes.len())?;
        // SAFETY: the copy is this function's own.
        unsafe { copy.bytes_mut(0, bytes.len()) }.copy_from_slice(bytes);
        for side in view.layers.iter().flat_map(|layer| [&layer.k, &layer.v]) {
            for head in 0..n_kv_heads {
                // SAFETY: inside the copy, whose layout is that of a page.
                let tile = unsafe { copy.base().as_ptr().add(side.offset + head * side.tile_bytes) };
                // SAFETY: nobody else knows the copy.
                let done = unsafe { clear_unused(&side.codec, tile, filled as usize) };
                done.map_err(|e| StateError::Codec { codec: side.codec.name().to_owned(), reason: e.to_string() })?;
            }
        }
        // SAFETY: as above.
        self.write(unsafe { copy.bytes(0, bytes.len()) })
    }
}

/// What there is of a page to save.
fn parts(store: &Store, page: u32) -> u32 {
    let page = &store.pages[page as usize];
    let exact = if page.stage.is_some() { EXACT } else { 0 };
    let record = if store.stage.is_none() || page.record == Record::Written { RECORD } else { 0 };
    exact | record
}

/// Lets a codec overwrite the slots from `filled` on of a copied tile. Slot by slot the others stay as they are, as when
/// tokens are taken back; a tile that was encoded as a whole is encoded again, with the last slot in place of the unused.
///
/// # Safety
/// Nobody else uses the tile, which is one of the codec's.
unsafe fn clear_unused(codec: &Codec, tile: *mut u8, filled: usize) -> Result<(), opencoti_plugin_api::Error> {
    let (d, unused) = (codec.head_dim(), PAGE_TOKENS - filled);
    let mut rows = vec![0f32; PAGE_TOKENS * d];
    // SAFETY: the caller's promise; there is a row for each slot.
    unsafe {
        if codec.layout().stage_tokens == 0 {
            return codec.append(tile, filled, unused, rows.as_ptr(), d);
        }
        codec.decode_page(tile, 0, filled, rows.as_mut_ptr(), d)?;
        codec.transform_output(rows.as_mut_ptr(), filled, d)?;
        let (used, unused) = rows.split_at_mut(filled * d);
        unused.chunks_exact_mut(d).for_each(|row| row.copy_from_slice(&used[(filled - 1) * d..]));
        codec.encode_page(tile, rows.as_ptr(), d)
    }
}
