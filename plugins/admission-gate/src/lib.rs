//! Admission policy `admission-gate`: prices a request before any of it is computed.
//!
//! The price is measured, not guessed: prompt tokens minus those already in the cache plus the declared bound on
//! generated tokens (0 when none is declared). It is compared with what every store has free or can drop; a store of
//! sliding-window layers never holds more of a sequence than its window. The host reserves what was priced, so that
//! two requests are not let in on the same free tokens.

use opencoti_plugin_api::Error;
use opencoti_plugin_api::admission::{AdmissionPolicy, Decision, Request, Snapshot, Store, Verdict};
use opencoti_plugin_api::export::{About, Plugin, admission_policy_root};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::root::PluginRoot;

/// Longest `Retry-After`, in seconds.
const MAX_RETRY_SECONDS: f32 = 3600.0;

/// What happens to a request that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Nothing is priced or reserved.
    Off,
    /// It is let in and its answer marked.
    Warn,
    /// It is refused.
    #[default]
    Enforced,
}

/// The policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gate {
    mode: Mode,
}

/// The root, for a host that links the plugin in.
pub fn root() -> &'static PluginRoot {
    admission_policy_root::<Gate>()
}

impl Plugin for Gate {
    const ABOUT: About = About {
        name: "admission-gate",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "prices a request in KV tokens and refuses, marks or admits what does not fit",
        capabilities: "",
        config_schema: r#"{"type":"object","additionalProperties":false,"properties":{"mode":{"enum":["off","warn","enforced"],"default":"enforced"}}}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        Gate::from_config(config)
    }
}

impl Gate {
    /// A gate in `mode`.
    pub const fn new(mode: Mode) -> Self {
        Gate { mode }
    }

    /// The gate of a config table: `{"mode": "off" | "warn" | "enforced"}`.
    pub fn from_config(config: &serde_json::Value) -> Result<Self, Error> {
        let table = config
            .as_object()
            .ok_or_else(|| Error::new(format!("the config of admission-gate is {config}, expected a table")))?;
        if let Some(key) = table.keys().find(|k| *k != "mode") {
            return Err(Error::new(format!("admission-gate has no config key `{key}`; its only key is `mode`")));
        }
        let mode = match table.get("mode") {
            None => Mode::default(),
            Some(value) => match value.as_str() {
                Some("off") => Mode::Off,
                Some("warn") => Mode::Warn,
                Some("enforced") => Mode::Enforced,
                _ => {
                    return Err(Error::new(format!(
                        "`mode` of admission-gate is {value}, expected \"off\", \"warn\" or \"enforced\""
                    )));
                }
            },
        };
        Ok(Gate::new(mode))
    }
}

/// Why a request does not fit.
struct Shortage {
    store: usize,
    never: bool,
    reason: String,
}

impl AdmissionPolicy for Gate {
    fn decide(&self, request: &Request, snapshot: &Snapshot) -> Result<Decision, Error> {
        // Those who wait have come first: a slot is free for this one only beyond theirs.
        let no_slot = snapshot.slots_free <= snapshot.queued;
        if self.mode == Mode::Off {
            return Ok(decision(if no_slot { Verdict::Queue } else { Verdict::Admit }, 0));
        }
        let demand = demand(request);
        let shortage = shortage(request, &snapshot.stores);
        let lenient = self.mode == Mode::Warn || request.overcommit;
        Ok(match shortage {
            Some(s) if s.never && !lenient => rejection(s, demand, snapshot),
            _ if no_slot => decision(Verdict::Queue, demand),
            Some(s) if lenient => Decision {
                warn: self.mode == Mode::Warn,
                short_store: Some(s.store),
                reason: s.reason,
                ..decision(Verdict::Admit, demand)
            },
            Some(s) => rejection(s, demand, snapshot),
            None => decision(Verdict::Admit, demand),
        })
    }
}

/// Tokens the request will add to a store of full attention.
fn demand(request: &Request) -> u64 {
    request.prompt_tokens.saturating_sub(request.shared_tokens).saturating_add(request.declared_tokens)
}

/// The first store that cannot hold the request at all, else the first that cannot hold it now.
fn shortage(request: &Request, stores: &[Store]) -> Option<Shortage> {
    let whole = request.prompt_tokens.saturating_add(request.declared_tokens);
    let never = stores.iter().position(|s| within_window(whole, s) > s.total);
    if let Some(store) = never {
        return Some(Shortage { store, never: true, reason: never_reason(request, &stores[store]) });
    }
    let asked = demand(request);
    let short = |s: &Store| within_window(asked, s) > s.free.saturating_add(s.reclaimable);
    let store = stores.iter().position(short)?;
    Some(Shortage { store, never: false, reason: short_reason(request, &stores[store]) })
}

/// Of `tokens`, those a store holds at one time.
fn within_window(tokens: u64, store: &Store) -> u64 {
    match store.window {
        0 => tokens,
        window => tokens.min(window),
    }
}

fn never_reason(request: &Request, store: &Store) -> String {
    format!(
        "the request can never fit: {} prompt tokens and a declared bound of {} take {} tokens of store `{}`, which has \
         {} in all; shorten the prompt, lower the bound or start the server with a larger cache",
        request.prompt_tokens,
        request.declared_tokens,
        within_window(request.prompt_tokens.saturating_add(request.declared_tokens), store),
        store.name,
        store.total
    )
}

fn short_reason(request: &Request, store: &Store) -> String {
    format!(
        "store `{}` is short: the request asks for {} tokens ({} of the prompt, {} of them shared, and a declared bound \
         of {}), {} are free and {} reclaimable; retry later or lower the bound",
        store.name,
        within_window(demand(request), store),
        request.prompt_tokens,
        request.shared_tokens.min(request.prompt_tokens),
        request.declared_tokens,
        store.free,
        store.reclaimable
    )
}

fn decision(verdict: Verdict, demand_tokens: u64) -> Decision {
    Decision { verdict, retry_after_seconds: 0, demand_tokens, warn: false, short_store: None, reason: String::new() }
}

fn rejection(shortage: Shortage, demand: u64, snapshot: &Snapshot) -> Decision {
    Decision {
        retry_after_seconds: retry_after(snapshot.seconds_to_next_release),
        short_store: Some(shortage.store),
        reason: shortage.reason,
        ..decision(Verdict::Reject, demand)
    }
}

/// Whole seconds, at least 1, also for an unknown (0) or nonsensical expectation.
fn retry_after(seconds: f32) -> u32 {
    // The cast turns NaN to 0.
    (seconds.ceil().clamp(0.0, MAX_RETRY_SECONDS) as u32).max(1)
}
