//! The rules of the cache, checked from scratch.

use opencoti_plugin_api::PAGE_TOKENS;

use crate::cache::Cache;
use crate::sequence::{Phase, SeqId, Sequence, first_held};

impl Cache {
    /// Recounts everything that is counted and says what is wrong, if anything is. For tests and diagnosis.
    pub fn check(&self) -> Result<(), String> {
        for (index, store) in self.stores.iter().enumerate() {
            self.check_store(index).map_err(|e| format!("store `{}`: {e}", store.name))?;
        }
        for (seq, sequence) in self.sequences.iter() {
            for (group, table) in sequence.tables.iter().enumerate() {
                let mut position = table.front().map_or(0, |e| e.start_pos);
                for entry in table {
                    ensure(entry.start_pos == position && entry.len > 0, || format!("{seq}: gap before {entry:?}"))?;
                    ensure(entry.len as usize <= PAGE_TOKENS, || format!("{seq}: {entry:?} is too long"))?;
                    position = entry.end();
                }
                ensure(position as usize == sequence.tokens.len(), || {
                    format!("{seq}: group {group} ends at {position}, not {}", sequence.tokens.len())
                })?;
                ensure(self.reaches_back(group, first_held(table), sequence.committed), || {
                    format!("{seq}: group {group} has released tokens that its window needs")
                })?;
            }
            ensure(sequence.in_flight || sequence.committed == sequence.tokens.len(), || {
                format!("{seq}: tokens neither written nor in a step")
            })?;
        }
        Ok(())
    }

    fn check_store(&self, index: usize) -> Result<(), String> {
        let store = &self.stores[index];
        let mut refs = vec![0u32; store.pages.len()];
        let mut live = vec![0u32; store.pages.len()];
        let mut promised = 0;
        for (seq, sequence) in self.sequences.iter() {
            for entry in sequence.tables.iter().flatten().filter(|e| e.store as usize == index) {
                refs[entry.page as usize] += 1;
                live[entry.page as usize] += u32::from(sequence.phase != Phase::Idle);
            }
            let promises = sequence.promises.iter().enumerate().filter(|(group, _)| self.active[*group] == index);
            for (_, promise) in promises {
                ensure(sequence.phase != Phase::Idle || promise.open() == 0, || format!("{seq}: idle, yet promised"))?;
                promised += promise.open();
            }
        }
        let mut is_free = vec![false; store.pages.len()];
        for &page in &store.free {
            ensure(!std::mem::replace(&mut is_free[page as usize], true), || format!("page {page} is free twice"))?;
        }
        for (i, page) in store.pages.iter().enumerate() {
            ensure(page.refs == refs[i] && page.live == live[i], || {
                format!("page {i} counts {page:?}, found {} entries, {} live", refs[i], live[i])
            })?;
            ensure(is_free[i] == (page.refs == 0), || format!("page {i} is free and used, or neither"))?;
            if let Some(writer) = page.writer {
                let holds = |(seq, s): (SeqId, &Sequence)| {
                    let mut entries = s.tables.iter().flatten();
                    seq.index == writer && entries.any(|e| e.store as usize == index && e.page as usize == i)
                };
                ensure(self.sequences.iter().any(holds), || format!("page {i} has a writer that does not hold it"))?;
            }
        }
        let reclaimable = (0..refs.len()).filter(|&i| refs[i] > 0 && live[i] == 0).count();
        ensure(store.reclaimable == reclaimable, || format!("{} reclaimable, found {reclaimable}", store.reclaimable))?;
        let held = live.iter().map(|&n| n as usize).sum::<usize>();
        ensure(store.held == held, || format!("{} held, found {held}", store.held))?;
        ensure(store.promised == promised, || format!("{} promised, found {promised}", store.promised))?;
        let kept = match store.window {
            Some(_) => held,
            None => store.pages.len() - store.free.len() - reclaimable,
        };
        ensure(kept + promised <= store.pages.len(), || format!("{promised} pages promised that are not there"))
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
