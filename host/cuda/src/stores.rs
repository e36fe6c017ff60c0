//! The card's copy of the cache's pages.
//!
//! A store has the same pages in the same layout on the card; what a step writes is written there, and the host's memory is
//! touched only when somebody asks for a page (saving) or has filled one (restoring).

use std::sync::Arc;

use opencoti_compute::plan::StoreView;
use opencoti_plugin_api::host::Codec;

use crate::CudaError;
use crate::compile::{Cache, CodecSource};
use crate::driver::{Gpu, Memory};
use crate::kernels::{AttentionKernels, Tiles};
use crate::plan::StoreKernels;

/// A pair of codecs at their head sizes.
struct Class {
    keys: (CodecSource, usize),
    values: (CodecSource, usize),
    kernels: AttentionKernels,
}

struct Mirror {
    /// Page 0 in the host's memory; the store's identity.
    base: usize,
    group: u32,
    class: usize,
    page_bytes: usize,
    n_pages: usize,
    memory: Memory,
    tiles: Vec<Tiles>,
}

/// All stores that steps have named.
pub(crate) struct Stores {
    gpu: Arc<Gpu>,
    cache: Cache,
    classes: Vec<Class>,
    mirrors: Vec<Mirror>,
    /// For each group a table of tiles: layer by layer, in each store by store.
    tables: Vec<Option<Memory>>,
}

impl Stores {
    pub(crate) fn new(gpu: &Arc<Gpu>, cache: Cache, groups: usize) -> Stores {
        let tables = (0..groups).map(|_| None).collect();
        Stores { gpu: Arc::clone(gpu), cache, classes: vec![], mirrors: vec![], tables }
    }

    /// The class of a pair of codecs, whose kernels are compiled if they are new.
    pub(crate) fn class(&mut self, k: &Codec, v: &Codec) -> Result<usize, CudaError> {
        for codec in [k, v] {
            if !codec.head_dim().is_multiple_of(32) || codec.head_dim() > 512 {
                let (name, d) = (codec.name(), codec.head_dim());
                return Err(CudaError::Unsupported(format!(
                    "codec `{name}` has heads of {d} values; the attention kernels take multiples of 32 up to 512"
                )));
            }
        }
        let (keys, values) = ((CodecSource::of(k)?, k.head_dim()), (CodecSource::of(v)?, v.head_dim()));
        if let Some(at) = self.classes.iter().position(|c| c.keys == keys && c.values == values) {
            return Ok(at);
        }
        let kernels = AttentionKernels::new(&self.gpu, &self.cache, (&keys.0, keys.1), (&values.0, values.1))?;
        self.classes.push(Class { keys, values, kernels });
        Ok(self.classes.len() - 1)
    }

    pub(crate) fn classes(&self) -> usize {
        self.classes.len()
    }

    pub(crate) fn kernels(&self, class: usize) -> &AttentionKernels {
        &self.classes[class].kernels
    }

    pub(crate) fn len(&self) -> usize {
        self.mirrors.len()
    }

    /// The class of a store that the kernels number `store`.
    pub(crate) fn class_of(&self, store: usize) -> usize {
        self.mirrors[store].class
    }

    /// The table of a group's tiles for its layer `layer`.
    pub(crate) fn table(&self, group: usize, layer: usize) -> u64 {
        let stride = (self.mirrors.len() * size_of::<Tiles>() * layer) as u64;
        self.tables[group].as_ref().map_or(0, |memory| memory.at() + stride)
    }

    /// Finds the store, or copies it to the card as it is. Says whether it is new.
    pub(crate) fn find(&mut self, view: &StoreView) -> Result<(StoreKernels, bool), CudaError> {
        let base = view.base.as_ptr() as usize;
        let same = |m: &Mirror| {
            m.base == base && m.group == view.group && m.page_bytes == view.page_bytes && m.n_pages == view.n_pages
        };
        if let Some(store) = self.mirrors.iter().position(same) {
            return Ok((self.kernels_of(store), false));
        }
        self.add(view)?;
        Ok((self.kernels_of(self.mirrors.len() - 1), true))
    }

    fn kernels_of(&self, store: usize) -> StoreKernels {
        let class = self.mirrors[store].class;
        let kernels = &self.classes[class].kernels;
        let (few_rows, many_rows) = (kernels.few.1.rows as usize, kernels.many.1.rows as usize);
        StoreKernels { store: store as u32, class, few_rows, many_rows }
    }

    fn add(&mut self, view: &StoreView) -> Result<(), CudaError> {
        let Some(first) = view.layers.first() else {
            return Err(CudaError::Wrong("a store has no layers".to_owned()));
        };
        let class = self.class(&first.k.codec, &first.v.codec)?;
        for layer in &view.layers {
            if layer.k.channels.is_some() || layer.v.channels.is_some() {
                return Err(CudaError::Unsupported(
                    "keys and values prepared by a table have no CUDA kernels".to_owned(),
                ));
            }
            if self.class(&layer.k.codec, &layer.v.codec)? != class {
                return Err(CudaError::Unsupported("a store has layers in different codecs".to_owned()));
            }
        }
        let bytes = view
            .page_bytes
            .checked_mul(view.n_pages)
            .ok_or_else(|| CudaError::Wrong("a store is larger than this machine's address space".to_owned()))?;
        let memory = self.gpu.allocate(bytes, "the KV cache")?;
        let tiles = view.layers.iter().map(|layer| Tiles {
            base: memory.at(),
            page_bytes: view.page_bytes as u64,
            k_offset: layer.k.offset as u64,
            v_offset: layer.v.offset as u64,
            k_tile_bytes: layer.k.tile_bytes as u32,
            v_tile_bytes: layer.v.tile_bytes as u32,
        });
        let tiles = tiles.collect();
        // A new store of a cache is empty: there is nothing to copy, and its memory is not even there yet. Pages that were
        // filled before are copied by `upload`.
        // SAFETY: the memory was just made.
        unsafe { self.gpu.zero(memory.at(), bytes) }?;
        let base = view.base.as_ptr() as usize;
        let (group, page_bytes, n_pages) = (view.group, view.page_bytes, view.n_pages);
        self.mirrors.push(Mirror { base, group, class, page_bytes, n_pages, memory, tiles });
        self.write_tables()
    }

    fn write_tables(&mut self) -> Result<(), CudaError> {
        for (group, table) in self.tables.iter_mut().enumerate() {
            let layers =
                self.mirrors.iter().filter(|m| m.group as usize == group).map(|m| m.tiles.len()).max().unwrap_or(0);
            let nothing: Tiles = bytemuck::Zeroable::zeroed();
            let of = |layer: usize, m: &Mirror| match m.group as usize == group {
                true => m.tiles.get(layer).copied().unwrap_or(nothing),
                false => nothing,
            };
            let rows: Vec<Tiles> =
                (0..layers).flat_map(|layer| self.mirrors.iter().map(move |m| of(layer, m))).collect();
            let memory = self.gpu.allocate(rows.len() * size_of::<Tiles>(), "tables of tiles")?;
            // SAFETY: the memory has that size; the copy is waited for before the rows go.
            unsafe { self.gpu.upload(memory.at(), bytemuck::cast_slice(&rows)) }?;
            self.gpu.synchronize()?;
            *table = Some(memory);
        }
        Ok(())
    }

    /// Copies a page from the card to the host's memory.
    ///
    /// # Safety
    /// The view is a living store's, and nobody else touches the page meanwhile.
    pub(crate) unsafe fn download(&self, view: &StoreView, page: u32) -> Result<(), CudaError> {
        let Some((mirror, offset)) = self.page(view, page) else { return Ok(()) };
        self.gpu.enter()?;
        // SAFETY: inside the store's memory, on both sides.
        unsafe {
            let to = std::slice::from_raw_parts_mut(view.base.as_ptr().add(offset), mirror.page_bytes);
            self.gpu.download(to, mirror.memory.at() + offset as u64)?;
        }
        self.gpu.synchronize()
    }

    /// Copies a page from the host's memory to the card.
    ///
    /// # Safety
    /// As [`download`](Self::download).
    pub(crate) unsafe fn upload(&mut self, view: &StoreView, page: u32) -> Result<(), CudaError> {
        self.find(view)?;
        let Some((mirror, offset)) = self.page(view, page) else { return Ok(()) };
        self.gpu.enter()?;
        // SAFETY: as above.
        unsafe {
            let from = std::slice::from_raw_parts(view.base.as_ptr().add(offset), mirror.page_bytes);
            self.gpu.upload(mirror.memory.at() + offset as u64, from)?;
        }
        self.gpu.synchronize()
    }

    fn page(&self, view: &StoreView, page: u32) -> Option<(&Mirror, usize)> {
        let base = view.base.as_ptr() as usize;
        let mirror = self.mirrors.iter().find(|m| m.base == base && m.group == view.group)?;
        ((page as usize) < mirror.n_pages).then_some((mirror, page as usize * mirror.page_bytes))
    }
}
