//! What a cache is made of, and how large each store must be.

use opencoti_compute::graph::{Graph, KvGeometry, StateGeometry};
use opencoti_compute::plan::{LayerTiles, TileSide};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;
use opencoti_plugin_api::kv_codec::Side;

use crate::error::ConfigError;
use crate::states::STATE;

/// Alignment of every tile, in bytes: a cache line, and the widest vector register.
const TILE_ALIGN: usize = 64;

/// One cache group: layers of equal geometry and the codecs of their keys and values.
#[derive(Clone)]
pub struct GroupConfig {
    /// Name for messages and metrics, for example `kv` or `swa`.
    pub name: String,
    /// Geometry that all its layers have.
    pub geometry: KvGeometry,
    /// Layers.
    pub n_layers: usize,
    /// Codec of the keys, opened for `geometry.k_head_dim`.
    pub k: Codec,
    /// Codec of the values, opened for `geometry.v_head_dim`.
    pub v: Codec,
}

/// Sizes of a cache.
#[derive(Clone)]
pub struct CacheConfig {
    /// Cache groups, in the order of the graph's.
    pub groups: Vec<GroupConfig>,
    /// Tokens that the stores of full attention hold, all sequences together; rounded up to pages.
    pub capacity_tokens: usize,
    /// Sequences that run at once. Stores of sliding windows hold one window for each.
    pub slots: usize,
    /// Idle sequences kept for prefix reuse; the least recently used goes first.
    pub recent_sequences: usize,
    /// Most tokens in one step.
    pub step_tokens: usize,
    /// Of the tokens that a sequence has written, so many of the last can always be taken back or left out by a fork,
    /// whatever its windows have released: rejected drafts, or the last token of a prompt that is in the cache as a
    /// whole. At least 1.
    pub rollback_tokens: usize,
    /// Every sequence is one text of which each token sees every other, as encoders have it: its tokens are planned in one
    /// step, and it neither goes on nor is forked.
    pub whole_texts: bool,
    /// Snapshots kept of sequences at chosen positions ([`crate::Cache::keep_snapshots`]), the least recently used goes
    /// first. Of use where a sequence can't be shared at any token: recurrent layers and sliding windows.
    pub snapshots: usize,
    /// Recurrent state; [`StateConfig::default`] for a model without recurrent layers.
    pub states: StateConfig,
}

/// Recurrent state of a model's sequences.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StateConfig {
    /// What a sequence keeps for each recurrent layer, in the order of the graph's.
    pub layers: Vec<StateGeometry>,
    /// Of the tokens that a running sequence has written in its last steps, so many can be taken back exactly: rejected
    /// drafts. Each costs a plane for each slot, and the writing of it.
    pub rollback: usize,
    /// Planes beyond those that running sequences need, for idle sequences and snapshots. With none, no prompt reuses
    /// what an ended sequence has computed.
    pub idle_planes: usize,
}

impl StateConfig {
    /// The recurrent layers of a model, without roll-back and with nothing for idle sequences.
    pub fn of(graph: &Graph) -> Self {
        StateConfig { layers: graph.state_layers.clone(), ..StateConfig::default() }
    }
}

/// Size of the store of recurrent state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StateSize {
    /// Bytes of a plane: the state of one sequence, all layers together.
    pub plane_bytes: usize,
    /// Planes.
    pub n_planes: usize,
}

impl StateSize {
    /// Bytes of the store.
    pub fn bytes(&self) -> u64 {
        (self.plane_bytes as u64).saturating_mul(self.n_planes as u64)
    }
}

/// Size of a group's store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreSize {
    /// Bytes of a page, all layers of the group together.
    pub page_bytes: usize,
    /// Pages.
    pub n_pages: usize,
}

impl StoreSize {
    /// Bytes of the store.
    pub fn bytes(&self) -> u64 {
        (self.page_bytes as u64).saturating_mul(self.n_pages as u64)
    }
}

/// Pages of a group: how they are laid out and how many of them there are.
pub(crate) struct StorePlan {
    pub(crate) layers: Vec<LayerTiles>,
    pub(crate) page_bytes: usize,
    pub(crate) n_pages: usize,
    /// Most pages that one sequence has at once in a windowed group, ordinary forks included.
    pub(crate) slot_pages: usize,
}

impl CacheConfig {
    /// Checks everything that can be checked without memory.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let positive = |field, value: usize| match value {
            0 => Err(ConfigError::Zero { field }),
            _ => Ok(()),
        };
        positive("groups", self.groups.len() + self.states.layers.len())?;
        positive("capacity_tokens", self.capacity_tokens)?;
        positive("slots", self.slots)?;
        positive("step_tokens", self.step_tokens)?;
        positive("rollback_tokens", self.rollback_tokens)?;
        for group in &self.groups {
            positive("n_layers", group.n_layers)?;
            positive("n_kv_heads", group.geometry.n_kv_heads)?;
            if let Some(window) = group.geometry.window {
                positive("window", window)?;
                if self.whole_texts {
                    return Err(ConfigError::WindowOfWholeTexts { group: group.name.clone() });
                }
            }
            group.check_codec(Side::K, &group.k, group.geometry.k_head_dim)?;
            group.check_codec(Side::V, &group.v, group.geometry.v_head_dim)?;
        }
        Ok(())
    }

    /// Sizes of the stores, one a group, without taking any memory.
    ///
    /// # Errors
    /// When the configuration can't be used or a size overflows.
    pub fn sizes(&self) -> Result<Vec<StoreSize>, ConfigError> {
        self.validate()?;
        let size = |group| self.store_plan(group).map(|p| StoreSize { page_bytes: p.page_bytes, n_pages: p.n_pages });
        self.groups.iter().map(size).collect()
    }

    /// Size of the store of recurrent state, without taking any memory; of no plane for a model without such layers.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn state_size(&self) -> Result<StateSize, ConfigError> {
        let states = &self.states;
        if states.layers.is_empty() {
            return Ok(StateSize::default());
        }
        let words = states
            .layers
            .iter()
            .try_fold(0usize, |sum, layer| sum.checked_add(layer.conv.checked_add(layer.recurrent)?));
        let size = || {
            let plane_bytes = words?.checked_mul(size_of::<f32>())?;
            let n_planes = self.slots.checked_mul(states.quota())?.checked_add(states.idle_planes)?;
            plane_bytes.checked_mul(n_planes)?;
            Some(StateSize { plane_bytes, n_planes })
        };
        size().ok_or_else(|| ConfigError::TooLarge { group: STATE.to_owned() })
    }

    /// Bytes of all stores together, without taking any memory.
    ///
    /// # Errors
    /// As for [`CacheConfig::sizes`].
    pub fn bytes(&self) -> Result<u64, ConfigError> {
        let mut bytes = self.state_size()?.bytes();
        for (group, size) in self.groups.iter().zip(self.sizes()?) {
            let too_large = || ConfigError::TooLarge { group: group.name.clone() };
            let store = (size.page_bytes as u64).checked_mul(size.n_pages as u64).ok_or_else(too_large)?;
            bytes = bytes.checked_add(store).ok_or_else(too_large)?;
        }
        Ok(bytes)
    }

    /// Layout and size of a group's store.
    pub(crate) fn store_plan(&self, group: &GroupConfig) -> Result<StorePlan, ConfigError> {
        let too_large = || ConfigError::TooLarge { group: group.name.clone() };
        let (layers, page_bytes) = group.layout().ok_or_else(too_large)?;
        let capacity_pages = self.capacity_tokens.div_ceil(PAGE_TOKENS);
        let Some(window) = group.geometry.window else {
            return Ok(StorePlan { layers, page_bytes, n_pages: capacity_pages, slot_pages: usize::MAX });
        };
        // One page more because a window does not start at a page's first slot, one because a fork cuts a page short.
        let pages = |tokens: Option<usize>| tokens.map(|t| t.div_ceil(PAGE_TOKENS) + 2).ok_or_else(too_large);
        let kept = window.checked_add(self.rollback_tokens);
        let idle_pages = pages(kept)?.min(capacity_pages + 1);
        let slot_pages = pages(kept.and_then(|t| t.checked_add(self.step_tokens)))?.min(capacity_pages + 1);
        let idle_sequences = self.recent_sequences.saturating_add(self.snapshots);
        // Idle sequences have no more pages here than where every page is kept, and of those there are `capacity_pages`.
        let n_pages = self
            .slots
            .checked_mul(slot_pages)
            .zip(idle_sequences.checked_mul(idle_pages))
            .and_then(|(live, idle)| live.checked_add(idle.min(capacity_pages)))
            .ok_or_else(too_large)?;
        Ok(StorePlan { layers, page_bytes, n_pages, slot_pages })
    }
}

impl GroupConfig {
    fn check_codec(&self, side: Side, codec: &Codec, head_dim: usize) -> Result<(), ConfigError> {
        if codec.side() != side || codec.head_dim() != head_dim {
            return Err(ConfigError::WrongCodec {
                group: self.name.clone(),
                codec: codec.name().to_owned(),
                found_side: codec.side(),
                found_dim: codec.head_dim(),
                side,
                head_dim,
            });
        }
        match codec.layout().stage_tokens {
            0 => Ok(()),
            stage_tokens => Err(ConfigError::Staged {
                group: self.name.clone(),
                codec: codec.name().to_owned(),
                side,
                stage_tokens,
            }),
        }
    }

    /// Tiles of every layer in a page, and the page's size; `None` when a size overflows.
    fn layout(&self) -> Option<(Vec<LayerTiles>, usize)> {
        let mut end = 0usize;
        let mut side = |codec: &Codec| {
            let tile_bytes = codec.layout().tile_bytes.checked_next_multiple_of(TILE_ALIGN)?;
            let offset = end;
            end = end.checked_add(tile_bytes.checked_mul(self.geometry.n_kv_heads)?)?;
            Some(TileSide { codec: codec.clone(), offset, tile_bytes })
        };
        let mut layers = Vec::new();
        for _ in 0..self.n_layers {
            layers.push(LayerTiles { k: side(&self.k)?, v: side(&self.v)? });
        }
        Some((layers, end))
    }
}
