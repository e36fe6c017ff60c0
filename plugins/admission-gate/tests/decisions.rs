//! Decisions of the gate, as tables.

use opencoti_admission_gate::{Gate, Mode};
use opencoti_plugin_api::admission::{AdmissionPolicy, Decision, Request, Snapshot, Store, Verdict};
use serde_json::json;

fn store(name: &str, total: u64, free: u64, reclaimable: u64, window: u64) -> Store {
    Store { name: name.into(), total, free, reclaimable, window }
}

fn idle(stores: Vec<Store>) -> Snapshot {
    Snapshot { stores, slots_total: 4, slots_free: 4, queued: 0, seconds_to_next_release: 2.4 }
}

fn ask(prompt_tokens: u64, shared_tokens: u64, declared_tokens: u64) -> Request {
    Request { prompt_tokens, shared_tokens, declared_tokens, ..Request::default() }
}

fn decide(mode: Mode, request: &Request, snapshot: &Snapshot) -> Decision {
    Gate::new(mode).decide(request, snapshot).unwrap()
}

#[test]
fn demand_is_prompt_minus_shared_plus_declared_against_free_plus_reclaimable() {
    use Verdict::{Admit, Reject};
    //   prompt shared declared | free reclaimable | demand verdict
    let table = [
        (100, 0, 50, 150, 0, 150, Admit),
        (100, 0, 51, 150, 0, 151, Reject),
        (100, 0, 50, 100, 50, 150, Admit),
        (100, 0, 50, 100, 49, 150, Reject),
        (100, 60, 50, 90, 0, 90, Admit),
        (100, 60, 50, 89, 0, 90, Reject),
        (100, 0, 0, 100, 0, 100, Admit),
        (100, 100, 0, 0, 0, 0, Admit),
        (100, 900, 7, 7, 0, 7, Admit),
        (100, 0, 50, u64::MAX, u64::MAX, 150, Admit),
    ];
    for (prompt, shared, declared, free, reclaimable, demand, verdict) in table {
        let snapshot = idle(vec![store("kv", 1000, free, reclaimable, 0)]);
        let decision = decide(Mode::Enforced, &ask(prompt, shared, declared), &snapshot);
        let row = format!("{prompt} - {shared} + {declared} in {free} + {reclaimable}");
        assert_eq!((decision.demand_tokens, decision.verdict), (demand, verdict), "{row}");
    }
}

#[test]
fn a_window_caps_what_a_store_of_sliding_layers_is_asked_for() {
    let stores = |free| vec![store("kv", 10_000, 10_000, 0, 0), store("swa", 2048, free, 0, 512)];
    let request = ask(5000, 0, 1000);
    assert_eq!(decide(Mode::Enforced, &request, &idle(stores(512))).verdict, Verdict::Admit);
    let short = decide(Mode::Enforced, &request, &idle(stores(511)));
    assert_eq!((short.verdict, short.short_store), (Verdict::Reject, Some(1)));
    assert_eq!(
        short.reason,
        "store `swa` is short: the request asks for 512 tokens (5000 of the prompt, 0 of them shared, and a declared \
         bound of 1000), 511 are free and 0 reclaimable; retry later or lower the bound"
    );
    // A request below the window is priced whole.
    assert_eq!(decide(Mode::Enforced, &ask(400, 0, 0), &idle(stores(400))).verdict, Verdict::Admit);
    assert_eq!(decide(Mode::Enforced, &ask(400, 0, 0), &idle(stores(399))).verdict, Verdict::Reject);
}

#[test]
fn what_never_fits_is_refused_even_when_every_slot_is_busy() {
    let mut snapshot = idle(vec![store("kv", 1000, 0, 0, 0)]);
    snapshot.slots_free = 0;
    let decision = decide(Mode::Enforced, &ask(900, 900, 101), &snapshot);
    assert_eq!(decision.verdict, Verdict::Reject);
    assert_eq!(
        decision.reason,
        "the request can never fit: 900 prompt tokens and a declared bound of 101 take 1001 tokens of store `kv`, which \
         has 1000 in all; shorten the prompt, lower the bound or start the server with a larger cache"
    );
    assert!(decision.retry_after_seconds >= 1);
}

#[test]
fn a_request_waits_for_a_slot_behind_those_that_came_first() {
    //   free slots, queued before it -> verdict
    let table = [
        (0, 0, Verdict::Queue),
        (1, 0, Verdict::Admit),
        (1, 1, Verdict::Queue),
        (2, 1, Verdict::Admit),
        (0, 9, Verdict::Queue),
    ];
    for mode in [Mode::Off, Mode::Warn, Mode::Enforced] {
        for (slots_free, queued, verdict) in table {
            let snapshot = Snapshot { slots_free, queued, ..idle(vec![store("kv", 1000, 1000, 0, 0)]) };
            assert_eq!(decide(mode, &ask(10, 0, 0), &snapshot).verdict, verdict, "{mode:?} {slots_free} {queued}");
        }
    }
}

#[test]
fn modes_differ_in_what_a_short_store_does() {
    let snapshot = idle(vec![store("kv", 1000, 10, 0, 0)]);
    let request = ask(100, 0, 0);
    let enforced = decide(Mode::Enforced, &request, &snapshot);
    assert_eq!((enforced.verdict, enforced.retry_after_seconds, enforced.warn), (Verdict::Reject, 3, false));
    let warn = decide(Mode::Warn, &request, &snapshot);
    assert_eq!((warn.verdict, warn.warn, warn.short_store), (Verdict::Admit, true, Some(0)));
    assert!(warn.reason.contains("store `kv` is short"));
    let off = decide(Mode::Off, &request, &snapshot);
    assert_eq!((off.verdict, off.warn, off.demand_tokens), (Verdict::Admit, false, 0));
}

#[test]
fn overcommit_passes_an_enforced_gate() {
    let snapshot = idle(vec![store("kv", 1000, 10, 0, 0)]);
    let request = Request { overcommit: true, ..ask(5000, 0, 0) };
    let decision = decide(Mode::Enforced, &request, &snapshot);
    assert_eq!((decision.verdict, decision.demand_tokens, decision.warn), (Verdict::Admit, 5000, false));
    assert_eq!(decision.short_store, Some(0));
}

#[test]
fn retry_after_is_whole_seconds_and_at_least_one() {
    let table = [(0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (f32::NAN, 1), (-5.0, 1), (f32::INFINITY, 3600), (1e9, 3600)];
    for (seconds_to_next_release, expected) in table {
        let snapshot = Snapshot { seconds_to_next_release, ..idle(vec![store("kv", 1000, 0, 0, 0)]) };
        let decision = decide(Mode::Enforced, &ask(1, 0, 0), &snapshot);
        assert_eq!(decision.retry_after_seconds, expected, "{seconds_to_next_release}");
    }
}

#[test]
fn sums_beyond_64_bits_are_short_and_never_wrap() {
    let snapshot = idle(vec![store("kv", 1000, 1000, 0, 0)]);
    let decision = decide(Mode::Enforced, &ask(u64::MAX, 0, u64::MAX), &snapshot);
    assert_eq!((decision.verdict, decision.demand_tokens), (Verdict::Reject, u64::MAX));
}

#[test]
fn a_server_without_stores_admits() {
    assert_eq!(decide(Mode::Enforced, &ask(10, 0, 0), &idle(vec![])).verdict, Verdict::Admit);
}

#[test]
fn config_names_what_it_found_and_expected() {
    let message = |config| Gate::from_config(&config).unwrap_err().message;
    assert!(Gate::from_config(&json!({})).is_ok());
    assert!(Gate::from_config(&json!({"mode": "warn"})).is_ok());
    assert_eq!(
        message(json!({"mode": "strict"})),
        "`mode` of admission-gate is \"strict\", expected \"off\", \"warn\" or \"enforced\""
    );
    assert_eq!(
        message(json!({"mode": 1})),
        "`mode` of admission-gate is 1, expected \"off\", \"warn\" or \"enforced\""
    );
    assert_eq!(message(json!({"mod": "off"})), "admission-gate has no config key `mod`; its only key is `mode`");
    assert_eq!(message(json!(3)), "the config of admission-gate is 3, expected a table");
}
