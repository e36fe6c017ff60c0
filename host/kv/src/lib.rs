//! The KV cache: pages, the sequences that refer to them, and the plans that executors run.
//!
//! A *store* is an arena of pages of one cache group (the layers of equal geometry) in one pair of codecs. A *sequence*
//! is a list of tokens with a page table for each group; an entry of a table says which page holds which positions.
//! Pages are counted: sequences with a common prefix hold the same pages.
//!
//! A store may have a *stage*: its newest and its first tokens are exact, and its pages are encoded as a whole ([`stage`]).
//!
//! A model with recurrent layers keeps a *plane* of state for each sequence beside its pages ([`states`]). Neither a
//! plane nor a sliding window lets a sequence be shared at any token, so *snapshots* are kept at chosen ones
//! ([`snapshots`]).
//!
//! Rules that everything here keeps, and that [`Cache::check`] verifies:
//! - A page has at most one writer. It fills free slots in order; everybody else reads the slots its own entry names
//!   and goes on in a page of its own, so that a fork at any token copies nothing.
//! - Only *committed* tokens are shared: those whose step has run.
//! - A page that no window of its holders reaches any more is given back when the step is committed.
//! - What was promised to a sequence cannot be taken by another one: a refusal comes at admission.
//!
//! One thread owns the cache. Between [`Cache::plan`] and [`Cache::commit`] an executor works on the pages of the step.

mod arena;
mod cache;
mod cascade;
mod check;
mod config;
mod error;
mod planning;
mod pool;
mod prefix;
mod sequence;
mod snapshots;
mod stage;
mod state;
mod states;
mod stats;
mod store;
mod tree;

pub use arena::available_bytes;
pub use cache::Cache;
pub use config::{CacheConfig, GroupConfig, StageConfig, StateConfig, StateSize, StoreSize};
pub use error::{CacheFull, ConfigError, KvError};
pub use planning::{BatchItem, Outputs, Planned, StepId};
pub use prefix::Prefix;
pub use sequence::{PageEntry, SeqId};
pub use state::{ModelFingerprint, StateError};
pub use stats::{StageStats, StateStats, StoreStats};
pub use tree::PrefixNode;
