//! Glue of policy plugins.

use core::ffi::c_void;
use core::mem::size_of;

use super::{Glue, Plugin, object};
use crate::admission::{
    self, AdmissionDecision, AdmissionPolicy, AdmissionPolicyVtbl, AdmissionRequest, AdmissionSnapshot, StoreState,
};
use crate::error::{Error, Status};
use crate::guard::guard;
use crate::residency::{self, ResidencyDecision, ResidencyPolicy, ResidencyPolicyVtbl, ResidencySnapshot};
use crate::root::{Kind, PluginRoot};
use crate::text::TextBuf;

impl<P: Plugin + ResidencyPolicy> Glue<P> {
    pub(super) const RESIDENCY_ROOT: &'static PluginRoot = &Self::root(
        &Self::manifest(Kind::ResidencyPolicy),
        core::ptr::from_ref::<ResidencyPolicyVtbl>(&ResidencyPolicyVtbl {
            size: size_of::<ResidencyPolicyVtbl>(),
            plan: residency_plan::<P>,
        })
        .cast(),
    );
}

impl<P: Plugin + AdmissionPolicy> Glue<P> {
    pub(super) const ADMISSION_ROOT: &'static PluginRoot = &Self::root(
        &Self::manifest(Kind::AdmissionPolicy),
        core::ptr::from_ref::<AdmissionPolicyVtbl>(&AdmissionPolicyVtbl {
            size: size_of::<AdmissionPolicyVtbl>(),
            decide: admission_decide::<P>,
        })
        .cast(),
    );
}

unsafe extern "C" fn residency_plan<P: ResidencyPolicy>(
    plugin: *mut c_void,
    snapshot: *const ResidencySnapshot,
    out: *mut ResidencyDecision,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers and counts are the host's promise for the length of the call.
    unsafe {
        guard(error, || {
            let s = &*snapshot;
            let groups = if s.n_groups == 0 { &[] } else { core::slice::from_raw_parts(s.groups, s.n_groups as usize) };
            let decision = object::<P>(plugin).plan(&residency::Snapshot {
                event: s.event,
                groups,
                device_budget: s.device_budget,
                host_budget: s.host_budget,
                link_bytes_per_second: s.link_bytes_per_second,
            })?;
            if decision.device_pages.len() != groups.len() {
                return Err(Error::new(format!(
                    "the policy decided on {} groups, expected {}",
                    decision.device_pages.len(),
                    groups.len()
                )));
            }
            for (i, pages) in decision.device_pages.iter().enumerate() {
                *(*out).device_pages.add(i) = *pages;
            }
            (*out).staging_slots = decision.staging_slots;
            Ok(())
        })
    }
}

unsafe extern "C" fn admission_decide<P: AdmissionPolicy>(
    plugin: *mut c_void,
    request: *const AdmissionRequest,
    snapshot: *const AdmissionSnapshot,
    out: *mut AdmissionDecision,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers and counts are the host's promise for the length of the call.
    unsafe {
        guard(error, || {
            let (r, s) = (&*request, &*snapshot);
            let request = admission::Request {
                prompt_tokens: r.prompt_tokens,
                shared_tokens: r.shared_tokens,
                declared_tokens: r.declared_tokens,
                overcommit: r.overcommit != 0,
                known_session: r.known_session != 0,
            };
            let snapshot = admission::Snapshot {
                stores: read_stores(s.stores, s.n_stores),
                slots_total: s.slots_total,
                slots_free: s.slots_free,
                queued: s.queued,
                seconds_to_next_release: s.seconds_to_next_release,
            };
            let decision = object::<P>(plugin).decide(&request, &snapshot)?;
            write_decision(&mut *out, &decision);
            Ok(())
        })
    }
}

/// # Safety
/// `stores` points to `n` stores whose names are valid during the call.
unsafe fn read_stores(stores: *const StoreState, n: u32) -> Vec<admission::Store> {
    // SAFETY: promised by the caller.
    let stores = if n == 0 { &[] } else { unsafe { core::slice::from_raw_parts(stores, n as usize) } };
    stores
        .iter()
        .map(|s| admission::Store {
            // SAFETY: promised by the caller.
            name: unsafe { s.name.to_string_lossy() },
            total: s.total,
            free: s.free,
            reclaimable: s.reclaimable,
            window: s.window,
        })
        .collect()
}

/// # Safety
/// The buffer in `out.reason` must be writable.
unsafe fn write_decision(out: &mut AdmissionDecision, decision: &admission::Decision) {
    out.verdict = match decision.verdict {
        admission::Verdict::Admit => admission::VERDICT_ADMIT,
        admission::Verdict::Queue => admission::VERDICT_QUEUE,
        admission::Verdict::Reject => admission::VERDICT_REJECT,
    };
    out.retry_after_seconds = decision.retry_after_seconds;
    out.demand_tokens = decision.demand_tokens;
    out.warn = decision.warn.into();
    out.short_store = decision.short_store.map_or(u32::MAX, |i| i as u32);
    // SAFETY: promised by the caller.
    unsafe { out.reason.write(&decision.reason) };
}
