//! Residency policies: how many pages of each cache group stay in device memory.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::{Error, Status};
use crate::text::TextBuf;

/// Why the policy is asked.
pub const EVENT_START: u32 = 0;
/// The cache has grown.
pub const EVENT_GROWTH: u32 = 1;
/// Device memory is short.
pub const EVENT_PRESSURE: u32 = 2;
/// Pages were released.
pub const EVENT_RELEASE: u32 = 3;

/// One cache group. Frozen.
#[repr(C)]
#[derive(Clone, Copy, Debug, AbiLayout)]
pub struct GroupState {
    /// Bytes of a page, all layers of the group together.
    pub page_bytes: u64,
    /// Pages the host wants to be able to hold.
    pub pages_total: u64,
    /// Pages in use.
    pub pages_used: u64,
    /// Layers in the group.
    pub layers: u32,
    /// Sliding window in tokens; 0 for full attention.
    pub window: u32,
}

/// What the policy is told. Valid until `plan` returns.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct ResidencySnapshot {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// One of the `EVENT_` codes.
    pub event: u32,
    /// Number of `groups`.
    pub n_groups: u32,
    /// The cache groups.
    pub groups: *const GroupState,
    /// Bytes that KV may take on the device.
    pub device_budget: u64,
    /// Bytes that KV may take in host memory beside it; 0 when the device is the host.
    pub host_budget: u64,
    /// Measured bytes per second between them; 0 when there is no link.
    pub link_bytes_per_second: f64,
}

/// What the policy answers. The host provides the arrays.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct ResidencyDecision {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// Out: pages of each group that stay on the device (`n_groups` entries).
    pub device_pages: *mut u64,
    /// Out: staging slots for streaming the rest.
    pub staging_slots: u32,
}

/// Functions of a residency plugin; `plugin` is the instance from the root's `create`.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct ResidencyPolicyVtbl {
    /// Bytes of this struct as the plugin was built.
    pub size: usize,
    /// `[engine-thread]` Decides. An error refuses the configuration (at start) or keeps the last decision (later).
    pub plan: unsafe extern "C" fn(
        plugin: *mut c_void,
        snapshot: *const ResidencySnapshot,
        out: *mut ResidencyDecision,
        error: *mut TextBuf,
    ) -> Status,
}

/// A snapshot for authors.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    /// One of the `EVENT_` codes.
    pub event: u32,
    /// The cache groups.
    pub groups: &'a [GroupState],
    /// Bytes on the device.
    pub device_budget: u64,
    /// Bytes in host memory.
    pub host_budget: u64,
    /// Link speed.
    pub link_bytes_per_second: f64,
}

/// A decision for authors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Pages of each group on the device.
    pub device_pages: Vec<u64>,
    /// Staging slots.
    pub staging_slots: u32,
}

/// A residency policy, as an author writes it.
pub trait ResidencyPolicy: Send + Sync + 'static {
    /// Decides; an error says in one sentence what does not fit and what to do.
    fn plan(&self, snapshot: &Snapshot) -> Result<Decision, Error>;
}
