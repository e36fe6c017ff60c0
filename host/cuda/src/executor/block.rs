//! The numbers of a step in one block of memory.

use std::sync::Arc;

use bytemuck::Pod;
use opencoti_compute::plan::Step;

use crate::CudaError;
use crate::driver::{Gpu, Memory, Pinned};
use crate::plan::{ExtraAngles, FlatGroup};

/// Where a group's arrays lie in the block, in bytes from its start.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct GroupSizes {
    pub(super) appends: usize,
    pub(super) n_appends: usize,
    pub(super) counts: usize,
    pub(super) items: usize,
    pub(super) queries: usize,
    pub(super) spans: usize,
    pub(super) first: usize,
    pub(super) partials: usize,
    /// Upper bounds of the items of each launch, 0 for none: few rows, then many, class by class.
    pub(super) launches: Vec<usize>,
    /// Whether the step writes to a store.
    pub(super) writes: Vec<bool>,
}

/// What a recording depends on: rows, and where everything lies.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) outputs: usize,
    pub(super) logits: usize,
    pub(super) angles: usize,
    pub(super) tokens_at: usize,
    pub(super) positions_at: usize,
    pub(super) outputs_at: usize,
    pub(super) logits_at: usize,
    pub(super) groups: Vec<GroupSizes>,
}

/// The block, here and on the card.
pub(super) struct Block {
    gpu: Arc<Gpu>,
    host: Pinned,
    device: Memory,
}

const FIRST_BYTES: usize = 1 << 20;
const ALIGN: usize = 16;

/// Writes arrays behind each other.
struct Writer<'a> {
    bytes: &'a mut [u8],
    end: usize,
}

impl Writer<'_> {
    /// Puts an array where there is room for the next power of two of elements, so that small changes move nothing. Says
    /// where, also when the block ends before.
    fn put<T: Pod>(&mut self, values: &[T]) -> usize {
        let at = self.end;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(to) = self.bytes.get_mut(at..at + bytes.len()) {
            to.copy_from_slice(bytes);
        }
        self.end += (rounded(values.len()) * size_of::<T>()).next_multiple_of(ALIGN);
        at
    }

    fn put_two<T: Pod>(&mut self, first: &[T], second: &[T]) -> usize {
        let at = self.end;
        let start = at + size_of_val(first);
        for (from, values) in [(at, first), (start, second)] {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            if let Some(to) = self.bytes.get_mut(from..from + bytes.len()) {
                to.copy_from_slice(bytes);
            }
        }
        self.end += (rounded(first.len() + second.len()) * size_of::<T>()).next_multiple_of(ALIGN);
        at
    }
}

/// Upper bound of a count: a power of two, 0 for none.
fn rounded(n: usize) -> usize {
    if n == 0 { 0 } else { n.next_power_of_two() }
}

impl Block {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Block, CudaError> {
        let device = gpu.allocate(FIRST_BYTES, "the numbers of a step")?;
        Ok(Block { gpu: Arc::clone(gpu), host: gpu.pinned(FIRST_BYTES)?, device })
    }

    /// Address on the card of what lies at `offset`.
    pub(super) fn at(&self, offset: usize) -> u64 {
        self.device.at() + offset as u64
    }

    /// Writes a step and queues its copy. Says whether the block moved.
    pub(super) fn fill(
        &mut self,
        step: &Step,
        extra: &ExtraAngles,
        groups: &[FlatGroup],
        stores: usize,
    ) -> Result<(Sizes, bool), CudaError> {
        let (mut sizes, mut len) = self.write(step, extra, groups, stores);
        let moved = len > self.device.len();
        if moved {
            self.gpu.synchronize()?;
            let room = len.next_power_of_two();
            self.device = self.gpu.allocate(room, "the numbers of a step")?;
            self.host = self.gpu.pinned(room)?;
            (sizes, len) = self.write(step, extra, groups, stores);
        }
        // SAFETY: the block has that size on both sides; every step ends with a synchronisation, so that nothing reads the
        // pinned memory when the next is written.
        unsafe { self.gpu.upload(self.device.at(), &self.host.bytes()[..len]) }?;
        Ok((sizes, moved))
    }

    fn write(&mut self, step: &Step, extra: &ExtraAngles, groups: &[FlatGroup], stores: usize) -> (Sizes, usize) {
        let mut w = Writer { bytes: self.host.bytes_mut(), end: 0 };
        let mut sizes = Sizes {
            tokens: step.tokens.len(),
            outputs: step.outputs.len(),
            logits: step.logits.len(),
            angles: step.tokens.len() + rounded(extra.positions.len()),
            tokens_at: w.put(&step.tokens),
            positions_at: w.put_two(&step.positions, &extra.positions),
            outputs_at: w.put(&step.outputs),
            logits_at: w.put(&step.logits),
            groups: Vec::with_capacity(groups.len()),
        };
        for flat in groups {
            let writes = (0..stores).map(|s| flat.appends.iter().any(|a| a.store as usize == s)).collect();
            sizes.groups.push(GroupSizes {
                n_appends: w.put(&[flat.appends.len() as u32]),
                counts: w.put(&flat.counts),
                appends: w.put(&flat.appends),
                items: w.put(&flat.items),
                queries: w.put(&flat.queries),
                spans: w.put(&flat.spans),
                first: w.put(&flat.first),
                partials: w.put(&flat.partials),
                launches: flat.counts.iter().map(|c| rounded(c.n_items as usize)).collect(),
                writes,
            });
        }
        let len = w.end;
        (sizes, len)
    }
}
