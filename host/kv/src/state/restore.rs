//! Reading state files.

use std::io::{Read, Seek, SeekFrom};

use opencoti_plugin_api::PAGE_TOKENS;
use sha2::{Digest, Sha256};

use super::header::{EXACT, FilePage, Header, Member, RECORD, Shape, Span};
use super::{DIGEST_BYTES, MAGIC, ModelFingerprint, PREFIX_BYTES, StateError, VERSION};
use crate::cache::Cache;
use crate::error::KvError;
use crate::planning::Need;
use crate::sequence::{PageEntry, SeqId, Table};
use crate::stage::Record;
use crate::states::PlaneEntry;
use crate::store::Store;

impl Cache {
    /// Makes a running sequence of a state file, and snapshots of those in it for which there is room. Everything is
    /// checked before a page is taken: the model, the format, geometry and codecs, the length, and the digests. Idle
    /// sequences are evicted when pages or planes are short.
    pub fn restore(&mut self, file: &mut (impl Read + Seek), model: &ModelFingerprint) -> Result<SeqId, StateError> {
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        let mut header = read_header(file, length)?;
        header.check_model(model)?;
        header.shape.check(&Shape::of(&self.config, &self.stores))?;
        self.check_members(&header)?;
        let contents_at = file.stream_position()?;
        let too_large = || StateError::Malformed("its contents are beyond any memory");
        let bytes = self.contents_bytes(&header).ok_or_else(too_large)?;
        let expected = bytes.checked_add(contents_at + DIGEST_BYTES as u64).ok_or_else(too_large)?;
        if length != expected {
            return Err(StateError::Length { found: length, expected });
        }
        check_contents(file, bytes)?;

        let known = |m: &Member| self.idle_copy(&header.tokens[..m.n_tokens as usize]).is_some();
        let wanted: Vec<bool> = header.members.iter().enumerate().map(|(i, m)| i == 0 || !known(m)).collect();
        let wanted = match self.make_room_for(&header, &wanted) {
            Ok(()) => wanted,
            Err(_) => {
                let alone: Vec<bool> = (0..header.members.len()).map(|i| i == 0).collect();
                self.make_room_for(&header, &alone)?;
                alone
            }
        };
        file.seek(SeekFrom::Start(contents_at))?;
        let seq = self.create();
        let mut taken = Taken { pages: vec![Vec::new(); self.active.len()], planes: Vec::new() };
        let read = self.read_contents(seq, &header, &wanted, &mut taken, file);
        if read.is_ok() {
            self.adopt(seq, &mut header, &wanted, &taken)?;
        }
        self.give_back(seq, &taken)?;
        match read {
            Ok(()) => Ok(seq),
            Err(error) => self.release(seq).map_err(StateError::from).and(Err(error)),
        }
    }

    /// Whether the members of a header are beginnings of its tokens that could go on, and use its pages as it says.
    fn check_members(&self, header: &Header) -> Result<(), StateError> {
        let lengths: Vec<usize> = header.members.iter().map(|m| m.n_tokens as usize).collect();
        let ascending = lengths.get(1..).is_some_and(|snapshots| {
            snapshots.windows(2).all(|w| w[0] < w[1]) && snapshots.iter().all(|n| (1..header.tokens.len()).contains(n))
        });
        if !ascending || lengths[0] != header.tokens.len() {
            return Err(StateError::Malformed("its sequences are not beginnings of its tokens"));
        }
        for (group, pages) in header.pages.iter().enumerate() {
            let staged = self.stores[self.active[group]].stage.is_some();
            let known = |page: &FilePage| match staged {
                true => page.parts != 0 && page.parts & !(RECORD | EXACT) == 0,
                false => page.parts == RECORD,
            };
            if !pages.iter().all(known) {
                return Err(StateError::Malformed("a page of it has parts that no page of this cache has"));
            }
            let mut uses = vec![None; pages.len()];
            for member in &header.members {
                self.check_table(group, member, &mut uses)?;
            }
            let as_told =
                |(found, page): (&Option<(u32, u32)>, &FilePage)| found.is_some_and(|(_, len)| len == page.filled);
            if !uses.iter().zip(pages).all(as_told) {
                return Err(StateError::Malformed("its pages are not filled as it says"));
            }
        }
        Ok(())
    }

    /// Checks a member's table in one group, and notes the first position and length of each page.
    fn check_table(&self, group: usize, member: &Member, uses: &mut [Option<(u32, u32)>]) -> Result<(), StateError> {
        let table = &member.tables[group];
        let first = table.first().map_or(0, |span| span.start);
        let mut position = first;
        for span in table {
            if span.start != position || span.len == 0 || span.len as usize > PAGE_TOKENS {
                return Err(StateError::Malformed("its pages do not follow each other"));
            }
            let place =
                uses.get_mut(span.page as usize).ok_or(StateError::Malformed("it has fewer pages than it uses"))?;
            let (start, len) = place.unwrap_or((span.start, 0));
            if start != span.start {
                return Err(StateError::Malformed("a page of it stands at two positions"));
            }
            *place = Some((start, len.max(span.len)));
            position = span.start.checked_add(span.len).ok_or(StateError::Malformed("its positions exceed 32 bits"))?;
        }
        if position != member.n_tokens {
            return Err(StateError::Malformed("its pages and its tokens do not end together"));
        }
        if !self.reaches_back(group, first, member.n_tokens as usize) {
            return Err(StateError::Malformed("its pages do not reach back far enough to go on"));
        }
        Ok(())
    }

    /// Bytes of all pages and planes of a header.
    fn contents_bytes(&self, header: &Header) -> Option<u64> {
        let mut bytes = 0u64;
        for (pages, &store) in header.pages.iter().zip(&self.active) {
            let count = |part| pages.iter().filter(|p| p.has(part)).count() as u64;
            let store = &self.stores[store];
            let exact = store.stage.as_ref().map_or(0, |stage| stage.view.page_bytes as u64);
            bytes = bytes.checked_add((store.view.page_bytes as u64).checked_mul(count(RECORD))?)?;
            bytes = bytes.checked_add(exact.checked_mul(count(EXACT))?)?;
        }
        let plane = self.config.state_size().ok()?.plane_bytes as u64;
        bytes.checked_add(plane.checked_mul(planes(header, |_| true) as u64)?)
    }

    /// Evicts idle sequences until there is room for the wanted members of a header. Fails, before it evicts any, when
    /// what is not promised does not suffice.
    fn make_room_for(&mut self, header: &Header, wanted: &[bool]) -> Result<(), StateError> {
        let need = |(group, &store): (usize, &usize)| {
            let used = used_pages(header, wanted, group);
            let exact = used.iter().filter(|&&place| header.pages[group][place as usize].has(EXACT)).count();
            Need { store, pages: used.len(), exact }
        };
        let needs: Vec<Need> = self.active.iter().enumerate().map(need).collect();
        for need in &needs {
            let store = &self.stores[need.store];
            if need.pages > store.headroom() {
                return Err(KvError::from(store.full(need.pages)).into());
            }
            store.check_stage_room(need.exact)?;
        }
        let asked = planes(header, |i| wanted[i]);
        self.check_new_planes(asked)?;
        self.evict_for(&needs)?;
        self.evict_planes(asked)?;
        Ok(())
    }

    /// Takes pages and planes for what is wanted, and reads them.
    fn read_contents(
        &mut self,
        seq: SeqId,
        header: &Header,
        wanted: &[bool],
        taken: &mut Taken,
        file: &mut impl Read,
    ) -> Result<(), StateError> {
        let mut contents = Contents { file, digest: Sha256::new() };
        for (group, pages) in header.pages.iter().enumerate() {
            let used = used_pages(header, wanted, group);
            let store = &mut self.stores[self.active[group]];
            for (place, described) in (0..).zip(pages) {
                if used.binary_search(&place).is_err() {
                    let stage = store.stage.as_ref().map_or(0, |stage| stage.view.page_bytes);
                    let sizes = [(RECORD, store.view.page_bytes), (EXACT, stage)];
                    sizes.iter().filter(|s| described.has(s.0)).try_for_each(|s| contents.skip(s.1 as u64))?;
                    continue;
                }
                let page = store.take_as(seq.index, described).ok_or_else(|| KvError::from(store.full(1)))?;
                taken.pages[group].push((place, page));
                if described.has(RECORD) {
                    // SAFETY: the page was just taken; no plan names it.
                    contents.read(unsafe { store.page_bytes_mut(page) })?;
                }
                let unit = store.pages[page as usize].stage;
                if let Some((stage, unit)) = store.stage.as_mut().zip(unit) {
                    // SAFETY: as above.
                    contents.read(unsafe { stage.page_bytes_mut(unit) })?;
                }
            }
        }
        if let Some(states) = &mut self.states {
            for (i, _) in header.members.iter().enumerate().filter(|(_, m)| m.n_tokens > 0) {
                if !wanted[i] {
                    contents.skip(states.plane_size() as u64)?;
                    continue;
                }
                let plane = states.pool.take().ok_or_else(|| KvError::from(states.full(1)))?;
                taken.planes.push((i, plane));
                // SAFETY: the plane was just taken; no plan names it.
                contents.read(unsafe { states.plane_bytes_mut(plane) })?;
            }
        }
        // The file may have changed since it was checked.
        check_digest(contents.digest, file, "contents")
    }

    /// Gives what was read to the sequence and to snapshots.
    fn adopt(&mut self, seq: SeqId, header: &mut Header, wanted: &[bool], taken: &Taken) -> Result<(), StateError> {
        let tokens = std::mem::take(&mut header.tokens);
        for (i, member) in header.members.iter().enumerate().filter(|(i, _)| wanted[*i]) {
            let owner = if i == 0 { seq } else { self.create() };
            let mut tables = Vec::with_capacity(member.tables.len());
            for (group, spans) in member.tables.iter().enumerate() {
                tables.push(self.share_spans(seq, group, spans, taken));
            }
            let plane = taken.planes.iter().find(|(of, _)| *of == i).map(|&(_, plane)| plane);
            if let (Some(states), Some(plane)) = (&mut self.states, plane) {
                states.pool.share(plane);
            }
            let sequence = self.sequences.get_mut(owner)?;
            sequence.tokens = tokens[..member.n_tokens as usize].to_vec();
            sequence.committed = sequence.tokens.len();
            sequence.tables = tables;
            sequence.planes.extend(plane.map(|plane| PlaneEntry { at: member.n_tokens, plane }));
            for (group, table) in sequence.tables.iter().enumerate() {
                self.stores[self.active[group]].settle_stage(&mut sequence.stage_promises[group], table);
            }
            if i > 0 {
                self.put_to_sleep(owner)?.is_snapshot = true;
            }
        }
        self.touch(seq)?;
        self.bound_snapshots();
        Ok(())
    }

    /// A table of pages that were read, with an entry of a running sequence for each. `writer` may go on in them.
    fn share_spans(&mut self, writer: SeqId, group: usize, spans: &[Span], taken: &Taken) -> Table {
        let index = self.active[group];
        let store = &mut self.stores[index];
        let entry = |span: &Span| {
            let at = taken.pages[group].binary_search_by_key(&span.page, |&(place, _)| place).ok()?;
            let page = taken.pages[group][at].1;
            store.share(page, span.len, writer.index);
            Some(PageEntry { store: index as u32, page, start_pos: span.start, len: span.len })
        };
        spans.iter().filter_map(entry).collect()
    }

    /// Drops the hold on what was read; members keep their own, and the sequence goes on in its pages.
    fn give_back(&mut self, seq: SeqId, taken: &Taken) -> Result<(), StateError> {
        let sequence = self.sequences.get(seq)?;
        for (group, pages) in taken.pages.iter().enumerate() {
            let store = &mut self.stores[self.active[group]];
            for &(_, page) in pages {
                store.drop_live(page, seq.index);
            }
            for entry in &sequence.tables[group] {
                store.set_writer(entry.page, seq.index);
            }
        }
        if let Some(states) = &mut self.states {
            for &(_, plane) in &taken.planes {
                states.pool.drop_live(plane);
            }
        }
        Ok(())
    }
}

impl Store {
    /// Takes a free page for what a file has of it.
    fn take_as(&mut self, writer: u32, described: &FilePage) -> Option<u32> {
        let page = match described.has(EXACT) || self.stage.is_none() {
            true => self.take(writer),
            false => self.take_record(writer),
        }?;
        let taken = &mut self.pages[page as usize];
        taken.filled = described.filled;
        if self.stage.is_some() && described.has(RECORD) {
            taken.record = Record::Written;
        }
        Some(page)
    }
}

/// What was taken for the contents of a file, with a hold of the sequence that is being made.
struct Taken {
    /// Place in the file and page, by group and ascending.
    pages: Vec<Vec<(u32, u32)>>,
    /// Member and plane.
    planes: Vec<(usize, u32)>,
}

/// Places in the file of a group's pages that some wanted member uses, ascending.
fn used_pages(header: &Header, wanted: &[bool], group: usize) -> Vec<u32> {
    let members = header.members.iter().zip(wanted).filter(|(_, wanted)| **wanted);
    let mut places: Vec<u32> = members.flat_map(|(m, _)| m.tables[group].iter().map(|span| span.page)).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// Planes of those members of a header for which `counts` holds.
fn planes(header: &Header, counts: impl Fn(usize) -> bool) -> usize {
    let members = header.members.iter().enumerate();
    members.filter(|(i, m)| header.shape.has_state() && m.n_tokens > 0 && counts(*i)).count()
}

/// What follows the header.
struct Contents<'a, R: Read> {
    file: &'a mut R,
    digest: Sha256,
}

impl<R: Read> Contents<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), StateError> {
        self.file.read_exact(bytes)?;
        self.digest.update(bytes);
        Ok(())
    }

    fn skip(&mut self, bytes: u64) -> Result<(), StateError> {
        let mut buffer = vec![0u8; 64 << 10];
        let mut left = bytes;
        while left > 0 {
            let n = left.min(buffer.len() as u64) as usize;
            self.read(&mut buffer[..n])?;
            left -= n as u64;
        }
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

/// Reads the contents and compares their digest.
fn check_contents(file: &mut impl Read, bytes: u64) -> Result<(), StateError> {
    let mut contents = Contents { file, digest: Sha256::new() };
    contents.skip(bytes)?;
    check_digest(contents.digest, file, "contents")
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
