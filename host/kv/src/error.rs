//! What can go wrong, in one sentence each.

use opencoti_plugin_api::kv_codec::Side;

use crate::sequence::SeqId;

/// A configuration that no cache can be made of.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A size of zero.
    #[error("`{field}` of the KV cache is 0, expected at least 1")]
    Zero {
        /// Which one.
        field: &'static str,
    },
    /// A codec opened for something else.
    #[error(
        "cache group `{group}` was given codec `{codec}` opened for {found_side} heads of {found_dim}, expected {side} \
         heads of {head_dim}"
    )]
    WrongCodec {
        /// Cache group.
        group: String,
        /// Codec.
        codec: String,
        /// Side it was opened for.
        found_side: Side,
        /// Head size it was opened for.
        found_dim: usize,
        /// Side it is used for.
        side: Side,
        /// Head size of the group.
        head_dim: usize,
    },
    /// A table of channels of another model.
    #[error("{name} has channels for other layers or heads than cache group `{group}` has")]
    Channels {
        /// Cache group.
        group: String,
        /// Name of the table.
        name: String,
    },
    /// A codec that encodes groups of tokens.
    #[error(
        "codec `{codec}` for {side} of cache group `{group}` encodes {stage_tokens} exact tokens as a whole, but the group \
         has no stage that keeps them, and is none itself; give it one, or choose another codec"
    )]
    Staged {
        /// Cache group.
        group: String,
        /// Codec.
        codec: String,
        /// Side.
        side: Side,
        /// Tokens it stages.
        stage_tokens: u32,
    },
    /// A sliding window where every token sees every other.
    #[error(
        "cache group `{group}` has a sliding window, which a model that reads texts in both directions cannot have"
    )]
    WindowOfWholeTexts {
        /// Cache group.
        group: String,
    },
    /// Exact newest tokens where no token is newer than another.
    #[error(
        "cache group `{group}` has a stage of exact tokens, which a model that reads texts in both directions cannot have"
    )]
    StageOfWholeTexts {
        /// Cache group.
        group: String,
    },
    /// Sizes beyond the address space.
    #[error("the store of cache group `{group}` is larger than memory can be addressed; lower the context size")]
    TooLarge {
        /// Cache group.
        group: String,
    },
    /// Not enough memory.
    #[error(
        "the KV cache needs {asked} bytes of memory but {available} are available; lower the context size or choose a \
         smaller codec"
    )]
    Memory {
        /// Bytes needed by all stores.
        asked: u64,
        /// Bytes that can be had.
        available: u64,
    },
    /// The system refused a mapping.
    #[error("the system refused {asked} bytes for the store of cache group `{group}`: {reason}")]
    Refused {
        /// Cache group.
        group: String,
        /// Bytes of the store.
        asked: u64,
        /// What the system said.
        reason: String,
    },
}

/// A store has too few pages, or planes, that are neither used nor promised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the cache `{store}` has room for {free} more {unit}, {asked} are needed")]
pub struct CacheFull {
    /// Name of the store's cache group; `state` for recurrent state.
    pub store: String,
    /// What is counted: `tokens` (in whole pages) or `states`.
    pub unit: &'static str,
    /// Units needed.
    pub asked: usize,
    /// Units free or reclaimable, and not promised.
    pub free: usize,
}

/// A refused operation on the cache. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// No room.
    #[error(transparent)]
    Full(#[from] CacheFull),
    /// A sequence that was released or evicted.
    #[error("sequence {0} does not exist any more")]
    UnknownSequence(SeqId),
    /// A sequence that a planned step writes.
    #[error("sequence {0} is part of a step that has not ended")]
    InFlight(SeqId),
    /// A second step at once.
    #[error("the step planned before has not been committed or aborted")]
    StepPending,
    /// The end of a step that is not the planned one.
    #[error("that step is not the one that was planned last")]
    UnknownStep,
    /// An idle sequence that is to run.
    #[error("sequence {0} is idle; begin a new one from its prefix")]
    Idle(SeqId),
    /// A running sequence that was expected to be idle.
    #[error("sequence {0} is in use, expected an idle one")]
    NotIdle(SeqId),
    /// A sequence twice in one step.
    #[error("sequence {0} is twice in one step")]
    Twice(SeqId),
    /// A batch item without tokens.
    #[error("sequence {0} is in a step with no token")]
    NoTokens(SeqId),
    /// A batch beyond its limit.
    #[error("a step of {found} tokens, expected at most {limit}")]
    StepTooLarge {
        /// Tokens of the batch.
        found: usize,
        /// Most tokens a step may have.
        limit: usize,
    },
    /// A text that goes on where texts are computed as a whole.
    #[error("sequence {0} has been computed as a whole and cannot go on")]
    Whole(SeqId),
    /// Positions beyond 32 bits.
    #[error("sequence {0} would be longer than 2^32 - 1 tokens")]
    TooLong(SeqId),
    /// A prefix that the donor cannot give.
    #[error("sequence {donor} cannot share its first {asked} tokens: {reason}")]
    CannotShare {
        /// Sequence asked for its prefix.
        donor: SeqId,
        /// Tokens asked for.
        asked: usize,
        /// Why.
        reason: &'static str,
    },
}
