//! Policy plugins.

use core::mem::size_of;
use std::sync::Arc;

use super::{Instance, read_table};
use crate::admission::{self, AdmissionDecision, AdmissionPolicyVtbl, AdmissionRequest, AdmissionSnapshot, StoreState};
use crate::error::Error;
use crate::residency::{self, ResidencyDecision, ResidencyPolicyVtbl, ResidencySnapshot};
use crate::root::{Kind, PluginRoot};
use crate::text::{Str, TextBuf};

/// A residency policy plugin.
#[derive(Clone)]
pub struct ResidencyPlugin {
    instance: Arc<Instance>,
    table: ResidencyPolicyVtbl,
}

impl ResidencyPlugin {
    /// The residency face of an instance; an error when it is of another kind.
    pub fn new(instance: Arc<Instance>) -> Result<Self, Error> {
        let table = instance.table(Kind::ResidencyPolicy, read_residency)?;
        Ok(ResidencyPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Asks the policy.
    pub fn plan(&self, snapshot: &residency::Snapshot) -> Result<residency::Decision, Error> {
        let mut device_pages = vec![0u64; snapshot.groups.len()];
        let wire = ResidencySnapshot {
            size: size_of::<ResidencySnapshot>(),
            event: snapshot.event,
            n_groups: snapshot.groups.len() as u32,
            groups: snapshot.groups.as_ptr(),
            device_budget: snapshot.device_budget,
            host_budget: snapshot.host_budget,
            link_bytes_per_second: snapshot.link_bytes_per_second,
        };
        let mut out = ResidencyDecision {
            size: size_of::<ResidencyDecision>(),
            device_pages: device_pages.as_mut_ptr(),
            staging_slots: 0,
        };
        // SAFETY: pointers live through the call; the array has `n_groups` entries.
        self.instance.control(|plugin, text| unsafe { (self.table.plan)(plugin, &wire, &mut out, text) })?;
        for (i, (&pages, group)) in device_pages.iter().zip(snapshot.groups).enumerate() {
            if pages > group.pages_total {
                self.instance.health.failed();
                return Err(Error::new(format!(
                    "policy `{}` keeps {pages} pages of group {i} on the device, which has {} pages",
                    self.instance.name, group.pages_total
                )));
            }
        }
        Ok(residency::Decision { device_pages, staging_slots: out.staging_slots })
    }
}

/// Copies the root's table of residency functions.
///
/// # Safety
/// As [`super::check_interface`].
pub(super) unsafe fn read_residency(root: &PluginRoot) -> Result<ResidencyPolicyVtbl, String> {
    // SAFETY: promised by the caller.
    unsafe { read_table(root.interface.cast::<ResidencyPolicyVtbl>()) }
}

/// Copies the root's table of admission functions.
///
/// # Safety
/// As [`super::check_interface`].
pub(super) unsafe fn read_admission(root: &PluginRoot) -> Result<AdmissionPolicyVtbl, String> {
    // SAFETY: promised by the caller.
    unsafe { read_table(root.interface.cast::<AdmissionPolicyVtbl>()) }
}

/// An admission policy plugin.
#[derive(Clone)]
pub struct AdmissionPlugin {
    instance: Arc<Instance>,
    table: AdmissionPolicyVtbl,
}

impl AdmissionPlugin {
    /// The admission face of an instance; an error when it is of another kind.
    pub fn new(instance: Arc<Instance>) -> Result<Self, Error> {
        let table = instance.table(Kind::AdmissionPolicy, read_admission)?;
        Ok(AdmissionPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Asks the policy.
    pub fn decide(
        &self,
        request: &admission::Request,
        snapshot: &admission::Snapshot,
    ) -> Result<admission::Decision, Error> {
        let stores: Vec<StoreState> = snapshot
            .stores
            .iter()
            .map(|s| StoreState {
                name: Str::new(&s.name),
                total: s.total,
                free: s.free,
                reclaimable: s.reclaimable,
                window: s.window,
            })
            .collect();
        let wire = AdmissionSnapshot {
            size: size_of::<AdmissionSnapshot>(),
            stores: stores.as_ptr(),
            n_stores: stores.len() as u32,
            slots_total: snapshot.slots_total,
            slots_free: snapshot.slots_free,
            queued: snapshot.queued,
            seconds_to_next_release: snapshot.seconds_to_next_release,
        };
        let request = AdmissionRequest {
            size: size_of::<AdmissionRequest>(),
            prompt_tokens: request.prompt_tokens,
            shared_tokens: request.shared_tokens,
            declared_tokens: request.declared_tokens,
            overcommit: request.overcommit.into(),
            known_session: request.known_session.into(),
        };
        let mut reason = [0u8; 512];
        let mut out = AdmissionDecision {
            size: size_of::<AdmissionDecision>(),
            verdict: admission::VERDICT_ADMIT,
            retry_after_seconds: 0,
            demand_tokens: 0,
            warn: 0,
            short_store: u32::MAX,
            reason: TextBuf::new(&mut reason),
        };
        let table = &self.table;
        // SAFETY: pointers live through the call.
        self.instance.control(|plugin, text| unsafe { (table.decide)(plugin, &request, &wire, &mut out, text) })?;
        let verdict = match out.verdict {
            admission::VERDICT_ADMIT => admission::Verdict::Admit,
            admission::VERDICT_QUEUE => admission::Verdict::Queue,
            admission::VERDICT_REJECT => admission::Verdict::Reject,
            other => {
                self.instance.health.failed();
                return Err(Error::new(format!(
                    "policy `{}` answered verdict {other}, expected 0, 1 or 2",
                    self.instance.name
                )));
            }
        };
        // A client that is told to come back in 0 seconds comes back at once, for ever.
        let least = u32::from(verdict == admission::Verdict::Reject);
        Ok(admission::Decision {
            verdict,
            retry_after_seconds: out.retry_after_seconds.max(least),
            demand_tokens: out.demand_tokens,
            warn: out.warn != 0,
            short_store: usize::try_from(out.short_store).ok().filter(|&i| i < stores.len()),
            // SAFETY: the buffer above, zeroed.
            reason: unsafe { out.reason.read() },
        })
    }
}
