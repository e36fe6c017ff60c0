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
    /// Exact tokens; needed by codecs that encode pages as a whole.
    pub stage: Option<StageConfig>,
}

/// Exact tokens of a group, besides what its codecs store.
#[derive(Clone)]
pub struct StageConfig {
    /// The newest tokens that every query meets exactly, rounded up to pages; those of the page it stands in are exact
    /// besides.
    pub tokens: usize,
    /// The first tokens that every query meets exactly, rounded up to pages. Windows that have left them meet none.
    pub sink: usize,
    /// Codec of exact keys, opened as that of the group.
    pub k: Codec,
    /// Codec of exact values.
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
    /// Of the sequences that run at once, for how many stores of sliding windows have room; for all without a number.
    pub window_sequences: Option<usize>,
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
    /// Bytes of a page of exact tokens; 0 without a stage.
    pub stage_page_bytes: usize,
    /// Pages of exact tokens.
    pub n_stage_pages: usize,
}

impl StoreSize {
    /// Bytes of the store, its stage included.
    pub fn bytes(&self) -> u64 {
        (self.page_bytes as u64).saturating_mul(self.n_pages as u64).saturating_add(self.stage_bytes())
    }

    /// Bytes of the stage.
    pub fn stage_bytes(&self) -> u64 {
        (self.stage_page_bytes as u64).saturating_mul(self.n_stage_pages as u64)
    }
}

/// The stage of a store: how its pages are laid out, how many there are, and who may have how many.
#[derive(Clone)]
pub(crate) struct StagePlan {
    pub(crate) layers: Vec<LayerTiles>,
    pub(crate) page_bytes: usize,
    pub(crate) n_pages: usize,
    /// Whether there are fewer than the store has, so that they must be promised.
    pub(crate) bounded: bool,
    /// Most pages that one sequence has between steps, ordinary forks included.
    pub(crate) slot_pages: usize,
    /// Pages kept for what a step takes until it is committed.
    pub(crate) step_pages: usize,
    /// Groups of positions before that of a query that it meets exactly.
    pub(crate) tail: usize,
    /// Pages that begin before this position are exact for good.
    pub(crate) sink: usize,
}

/// Pages of a group: how they are laid out and how many of them there are.
pub(crate) struct StorePlan {
    pub(crate) layers: Vec<LayerTiles>,
    pub(crate) page_bytes: usize,
    pub(crate) n_pages: usize,
    /// Most pages that one sequence has at once in a windowed group, ordinary forks included.
    pub(crate) slot_pages: usize,
    /// Exact tokens beside them.
    pub(crate) stage: Option<StagePlan>,
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
        positive("window_sequences", self.window_sequences.unwrap_or(1))?;
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
            let Some(stage) = &group.stage else {
                group.check_needs_no_stage(&group.k)?;
                group.check_needs_no_stage(&group.v)?;
                continue;
            };
            if self.whole_texts {
                return Err(ConfigError::StageOfWholeTexts { group: group.name.clone() });
            }
            group.check_codec(Side::K, &stage.k, group.geometry.k_head_dim)?;
            group.check_codec(Side::V, &stage.v, group.geometry.v_head_dim)?;
            group.check_needs_no_stage(&stage.k)?;
            group.check_needs_no_stage(&stage.v)?;
        }
        Ok(())
    }

    /// Sizes of the stores, one a group, without taking any memory.
    ///
    /// # Errors
    /// When the configuration can't be used or a size overflows.
    pub fn sizes(&self) -> Result<Vec<StoreSize>, ConfigError> {
        self.validate()?;
        let size = |group| {
            self.store_plan(group).map(|p| StoreSize {
                page_bytes: p.page_bytes,
                n_pages: p.n_pages,
                stage_page_bytes: p.stage.as_ref().map_or(0, |s| s.page_bytes),
                n_stage_pages: p.stage.as_ref().map_or(0, |s| s.n_pages),
            })
        };
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
            for (page, pages) in [(size.page_bytes, size.n_pages), (size.stage_page_bytes, size.n_stage_pages)] {
                let part = (page as u64).checked_mul(pages as u64).ok_or_else(too_large)?;
                bytes = bytes.checked_add(part).ok_or_else(too_large)?;
            }
        }
        Ok(bytes)
    }

    /// Layout and size of a group's store.
    pub(crate) fn store_plan(&self, group: &GroupConfig) -> Result<StorePlan, ConfigError> {
        let too_large = || ConfigError::TooLarge { group: group.name.clone() };
        let (layers, page_bytes) = group.layout(&group.k, &group.v).ok_or_else(too_large)?;
        let capacity_pages = self.capacity_tokens.div_ceil(PAGE_TOKENS);
        let Some(window) = group.geometry.window else {
            let stage = self.stage_plan(group, capacity_pages, usize::MAX).ok_or_else(too_large)?;
            return Ok(StorePlan { layers, page_bytes, n_pages: capacity_pages, slot_pages: usize::MAX, stage });
        };
        // One page more because a window does not start at a page's first slot, one because a fork cuts a page short.
        let pages = |tokens: Option<usize>| tokens.map(|t| t.div_ceil(PAGE_TOKENS) + 2).ok_or_else(too_large);
        let kept = window.checked_add(self.rollback_tokens);
        let idle_pages = pages(kept)?.min(capacity_pages + 1);
        let slot_pages = pages(kept.and_then(|t| t.checked_add(self.step_tokens)))?.min(capacity_pages + 1);
        let idle_sequences = self.recent_sequences.saturating_add(self.snapshots);
        // Idle sequences have no more pages here than where every page is kept, and of those there are `capacity_pages`.
        let live = self.window_sequences.map_or(self.slots, |budget| budget.min(self.slots));
        let n_pages = live
            .checked_mul(slot_pages)
            .zip(idle_sequences.checked_mul(idle_pages))
            .and_then(|(live, idle)| live.checked_add(idle.min(capacity_pages)))
            .ok_or_else(too_large)?;
        let stage = self.stage_plan(group, n_pages, slot_pages).ok_or_else(too_large)?;
        Ok(StorePlan { layers, page_bytes, n_pages, slot_pages, stage })
    }

    /// The stage of a group whose store has `n_pages`, of which a sequence has at most `most`; `None` when a size overflows.
    #[allow(clippy::option_option, reason = "a size that overflows, or no stage")]
    fn stage_plan(&self, group: &GroupConfig, n_pages: usize, most: usize) -> Option<Option<StagePlan>> {
        let Some(stage) = &group.stage else { return Some(None) };
        let (layers, page_bytes) = group.layout(&stage.k, &stage.v)?;
        // What the last tokens that may be taken back need must be exact still.
        let newest = stage.tokens.min(group.geometry.window.unwrap_or(usize::MAX));
        let tail = newest.max(self.rollback_tokens - 1).div_ceil(PAGE_TOKENS);
        let sink =
            if group.geometry.window.is_some() { 0 } else { stage.sink.checked_next_multiple_of(PAGE_TOKENS)? };
        // The page that is being filled, two that a fork or a roll-back cuts, and one into which a step reaches.
        let slot_pages = tail.checked_add(3 + self.rollback_tokens.div_ceil(PAGE_TOKENS) + sink / PAGE_TOKENS)?;
        let slot_pages = slot_pages.min(most);
        let step_pages = self.step_tokens.div_ceil(PAGE_TOKENS);
        let asked = self.slots.checked_mul(slot_pages)?.checked_add(step_pages)?;
        let bounded = asked < n_pages;
        let n_pages = asked.min(n_pages);
        Some(Some(StagePlan { layers, page_bytes, n_pages, bounded, slot_pages, step_pages, tail, sink }))
    }

    /// Where the stage of a group is among a step's stores.
    pub(crate) fn stage_index(&self, group: usize) -> u32 {
        (self.groups.len() + self.groups[..group].iter().filter(|g| g.stage.is_some()).count()) as u32
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
        Ok(())
    }

    /// Fails for a codec that encodes pages as a whole.
    fn check_needs_no_stage(&self, codec: &Codec) -> Result<(), ConfigError> {
        match codec.layout().stage_tokens {
            0 => Ok(()),
            stage_tokens => Err(ConfigError::Staged {
                group: self.name.clone(),
                codec: codec.name().to_owned(),
                side: codec.side(),
                stage_tokens,
            }),
        }
    }

    /// Tiles of every layer in a page of these codecs, and the page's size; `None` when a size overflows.
    fn layout(&self, k: &Codec, v: &Codec) -> Option<(Vec<LayerTiles>, usize)> {
        let mut end = 0usize;
        let mut side = |codec: &Codec| {
            let tile_bytes = codec.layout().tile_bytes.checked_next_multiple_of(TILE_ALIGN)?;
            let offset = end;
            end = end.checked_add(tile_bytes.checked_mul(self.geometry.n_kv_heads)?)?;
            Some(TileSide { codec: codec.clone(), offset, tile_bytes, channels: None })
        };
        let mut layers = Vec::new();
        for _ in 0..self.n_layers {
            layers.push(LayerTiles { k: side(k)?, v: side(v)? });
        }
        Some((layers, end))
    }
}
