//! Admission policies: may this request start now?
//!
//! A policy is a pure decision from a snapshot. The host does the reserving: it takes the demand that the policy
//! priced, reserves it in every store at once, and releases it when the request ends.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::{Error, Status};
use crate::text::{Str, TextBuf};

/// Let it in.
pub const VERDICT_ADMIT: u32 = 0;
/// Keep it in the queue.
pub const VERDICT_QUEUE: u32 = 1;
/// Answer 429 with `Retry-After`.
pub const VERDICT_REJECT: u32 = 2;

/// One store of the cache, in tokens. Frozen.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct StoreState {
    /// Name for messages, for example `kv` or `swa`.
    pub name: Str,
    /// Token slots it has.
    pub total: u64,
    /// Slots neither used nor promised to anybody.
    pub free: u64,
    /// Used slots that nobody is using now and that can be dropped.
    pub reclaimable: u64,
    /// Sliding window in tokens; 0 for full attention.
    pub window: u64,
}

/// The request. Valid until `decide` returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, AbiLayout)]
#[abi(growing)]
pub struct AdmissionRequest {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of these, tokens already in the cache that it will share.
    pub shared_tokens: u64,
    /// The declared bound on generated tokens; 0 when it declares none.
    pub declared_tokens: u64,
    /// 1 when the client asked to be let in whatever the price.
    pub overcommit: u32,
    /// 1 when its session has run before.
    pub known_session: u32,
}

/// The server. Valid until `decide` returns.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct AdmissionSnapshot {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// The stores.
    pub stores: *const StoreState,
    /// Number of `stores`.
    pub n_stores: u32,
    /// Slots in all.
    pub slots_total: u32,
    /// Slots without a request.
    pub slots_free: u32,
    /// Requests waiting before this one.
    pub queued: u32,
    /// Seconds until a running request is expected to end; 0 when unknown.
    pub seconds_to_next_release: f32,
}

/// The answer.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct AdmissionDecision {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// Out: one of the `VERDICT_` codes.
    pub verdict: u32,
    /// Out: seconds for `Retry-After`, at least 1 with a rejection.
    pub retry_after_seconds: u32,
    /// Out: tokens to reserve in every store (at most its window), before prefill; when the request is admitted though
    /// a store is short, as many of them as the store has.
    pub demand_tokens: u64,
    /// Out: 1 to mark the answer as saturated (a warning header) though admitted.
    pub warn: u32,
    /// Out: index of the short store, or `u32::MAX`.
    pub short_store: u32,
    /// Out: one sentence with a rejection or warning.
    pub reason: TextBuf,
}

/// Functions of an admission plugin; `plugin` is the instance from the root's `create`.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct AdmissionPolicyVtbl {
    /// Bytes of this struct as the plugin was built.
    pub size: usize,
    /// `[engine-thread]` Decides, within microseconds. On an error the host's built-in rule answers.
    pub decide: unsafe extern "C" fn(
        plugin: *mut c_void,
        request: *const AdmissionRequest,
        snapshot: *const AdmissionSnapshot,
        out: *mut AdmissionDecision,
        error: *mut TextBuf,
    ) -> Status,
}

/// A store, for authors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Name for messages.
    pub name: String,
    /// Token slots.
    pub total: u64,
    /// Unused and unpromised.
    pub free: u64,
    /// Droppable.
    pub reclaimable: u64,
    /// Sliding window; 0 for full attention.
    pub window: u64,
}

/// A request, for authors. Fields as in [`AdmissionRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens it shares.
    pub shared_tokens: u64,
    /// Declared bound; 0 for none.
    pub declared_tokens: u64,
    /// Asked to be let in anyway.
    pub overcommit: bool,
    /// Its session has run before.
    pub known_session: bool,
}

/// A snapshot, for authors. Fields as in [`AdmissionSnapshot`].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Snapshot {
    /// The stores.
    pub stores: Vec<Store>,
    /// Slots in all.
    pub slots_total: u32,
    /// Idle slots.
    pub slots_free: u32,
    /// Waiting requests.
    pub queued: u32,
    /// Seconds to the next release; 0 when unknown.
    pub seconds_to_next_release: f32,
}

/// Verdicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it in.
    Admit,
    /// Keep it waiting.
    Queue,
    /// Refuse with 429.
    Reject,
}

/// A decision, for authors. Fields as in [`AdmissionDecision`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The verdict.
    pub verdict: Verdict,
    /// Seconds for `Retry-After`.
    pub retry_after_seconds: u32,
    /// Tokens to reserve.
    pub demand_tokens: u64,
    /// Mark as saturated.
    pub warn: bool,
    /// Index of the short store.
    pub short_store: Option<usize>,
    /// One sentence.
    pub reason: String,
}

/// An admission policy, as an author writes it.
pub trait AdmissionPolicy: Send + Sync + 'static {
    /// Decides.
    fn decide(&self, request: &Request, snapshot: &Snapshot) -> Result<Decision, Error>;
}
