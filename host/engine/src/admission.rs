//! Admission: whether a request may start now, and what is reserved for it.
//!
//! A policy decides from a snapshot; the engine does the reserving. The engine knows the policy only as an
//! [`AdmissionDecider`], so that it depends on no plugin loader. A policy that fails is answered for by the built-in
//! rule, which is what the policy's contract promises.

use opencoti_kv::{Cache, StoreStats};
use opencoti_plugin_api::admission::{Decision, Request, Snapshot, Store, Verdict};
use opencoti_plugin_api::host::AdmissionPlugin;

/// Decides for each request whether it may start. Called on the engine thread before prefill.
pub trait AdmissionDecider: Send {
    /// Decides, within microseconds. On an error the built-in rule answers.
    fn decide(&mut self, request: &Request, snapshot: &Snapshot) -> Result<Decision, String>;
}

impl AdmissionDecider for AdmissionPlugin {
    fn decide(&mut self, request: &Request, snapshot: &Snapshot) -> Result<Decision, String> {
        AdmissionPlugin::decide(self, request, snapshot).map_err(|e| e.to_string())
    }
}

/// The policy with the built-in rule behind it.
pub(crate) struct Gate {
    decider: Option<Box<dyn AdmissionDecider>>,
}

impl Gate {
    pub(crate) fn new(decider: Option<Box<dyn AdmissionDecider>>) -> Self {
        Self { decider }
    }

    pub(crate) fn decide(&mut self, request: &Request, snapshot: &Snapshot) -> Decision {
        let decision = match &mut self.decider {
            Some(decider) => decider.decide(request, snapshot),
            None => Ok(built_in(request, snapshot)),
        };
        let mut decision = decision.unwrap_or_else(|error| {
            tracing::warn!(%error, "the admission policy failed, the built-in rule decides");
            built_in(request, snapshot)
        });
        decision.retry_after_seconds = decision.retry_after_seconds.max(1);
        decision
    }
}

/// Tokens that a request needs beyond what it shares.
fn demand(request: &Request) -> u64 {
    request.prompt_tokens.saturating_sub(request.shared_tokens).saturating_add(request.declared_tokens)
}

/// The rule without a policy: the demand must fit what every store can still promise. A sliding window never needs more
/// than itself.
pub(crate) fn built_in(request: &Request, snapshot: &Snapshot) -> Decision {
    let demand = demand(request);
    let needed = |store: &Store| if store.window > 0 { demand.min(store.window) } else { demand };
    let room = |store: &Store| store.free.saturating_add(store.reclaimable);
    let short = snapshot.stores.iter().position(|store| needed(store) > room(store));
    let mut decision = Decision {
        verdict: Verdict::Admit,
        retry_after_seconds: retry_after(snapshot.seconds_to_next_release),
        demand_tokens: demand,
        warn: false,
        short_store: short,
        reason: String::new(),
    };
    if let Some(store) = short.map(|i| &snapshot.stores[i]) {
        decision.reason = format!(
            "the cache `{}` has room for {} more tokens, {} are needed",
            store.name,
            room(store),
            needed(store)
        );
        decision.warn = request.overcommit;
        decision.verdict = if request.overcommit { Verdict::Admit } else { Verdict::Reject };
    }
    decision
}

/// Whole seconds, at least 1.
pub(crate) fn retry_after(seconds: f32) -> u32 {
    (seconds.ceil() as u32).max(1)
}

/// The stores of a cache in tokens, as a policy sees them. Recurrent state is one too, of planes: a sequence needs one
/// for each of its tokens, but never more than its window, the planes of a step.
pub(crate) fn stores(cache: &Cache) -> Vec<Store> {
    let tokens = |pages: usize| StoreStats::tokens(pages) as u64;
    let store = |s: &StoreStats| Store {
        name: s.name.clone(),
        total: tokens(s.total),
        free: tokens(s.available_free()),
        reclaimable: tokens(s.available_reclaimable()),
        window: s.window.unwrap_or(0) as u64,
    };
    let state = cache.state_stats().map(|s| Store {
        name: "state".to_owned(),
        total: s.total as u64,
        free: s.available.saturating_sub(s.reclaimable) as u64,
        reclaimable: s.available.min(s.reclaimable) as u64,
        window: s.per_sequence as u64,
    });
    let stats = cache.stats();
    stats.iter().map(store).chain(stats.iter().filter_map(stage)).chain(state).collect()
}

/// The exact tokens of a store, of which a sequence has a window at most; `None` where there is room for all.
fn stage(of: &StoreStats) -> Option<Store> {
    let tokens = |pages: usize| StoreStats::tokens(pages) as u64;
    let stage = of.stage.filter(|stage| stage.bounded)?;
    Some(Store {
        name: format!("{} stage", of.name),
        total: tokens(stage.total),
        free: tokens(stage.available.min(stage.free)),
        reclaimable: tokens(stage.available.saturating_sub(stage.free)),
        window: tokens(stage.per_sequence),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(free: u64, reclaimable: u64) -> Snapshot {
        let store = |name: &str, window| Store { name: name.to_owned(), total: 1024, free, reclaimable, window };
        Snapshot { stores: vec![store("kv", 0), store("swa", 64)], seconds_to_next_release: 2.2, ..Snapshot::default() }
    }

    fn request(prompt_tokens: u64, shared_tokens: u64, declared_tokens: u64) -> Request {
        Request { prompt_tokens, shared_tokens, declared_tokens, ..Request::default() }
    }

    #[test]
    fn the_demand_is_the_prompt_less_the_shared_part_plus_the_declared_bound() {
        let decision = built_in(&request(300, 100, 50), &snapshot(200, 50));
        assert_eq!((decision.verdict, decision.demand_tokens), (Verdict::Admit, 250));
        assert_eq!(built_in(&request(300, 100, 51), &snapshot(200, 50)).verdict, Verdict::Reject);
    }

    #[test]
    fn a_rejection_names_the_short_store_and_when_to_come_back() {
        let decision = built_in(&request(300, 0, 0), &snapshot(200, 50));
        assert_eq!(decision.reason, "the cache `kv` has room for 250 more tokens, 300 are needed");
        assert_eq!((decision.short_store, decision.retry_after_seconds), (Some(0), 3));
    }

    #[test]
    fn a_window_needs_no_more_than_itself() {
        let mut snapshot = snapshot(1000, 0);
        snapshot.stores[1].free = 64;
        assert_eq!(built_in(&request(300, 0, 0), &snapshot).verdict, Verdict::Admit);
        snapshot.stores[1].free = 63;
        assert_eq!(built_in(&request(300, 0, 0), &snapshot).short_store, Some(1));
    }

    #[test]
    fn overcommit_passes_with_a_warning() {
        let request = Request { overcommit: true, ..request(300, 0, 0) };
        let decision = built_in(&request, &snapshot(0, 0));
        assert_eq!((decision.verdict, decision.warn), (Verdict::Admit, true));
    }

    #[test]
    fn the_built_in_rule_answers_for_a_policy_that_fails() {
        struct Broken;
        impl AdmissionDecider for Broken {
            fn decide(&mut self, _: &Request, _: &Snapshot) -> Result<Decision, String> {
                Err("quarantined".to_owned())
            }
        }
        let mut gate = Gate::new(Some(Box::new(Broken)));
        assert_eq!(gate.decide(&request(10, 0, 0), &snapshot(20, 0)).verdict, Verdict::Admit);
        assert_eq!(gate.decide(&request(30, 0, 0), &snapshot(20, 0)).verdict, Verdict::Reject);
    }
}
