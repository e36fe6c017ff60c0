//! Pools: prefixes that stay, what attaches to them, and when they go.

use super::rig::{Rig, Running, Sizes, prompt, request};
use crate::api::{Command, EngineError, Event, GenerateRequest, SharedSlot};
use crate::pools::{
    Capacity, Capture, MakePool, Origin, PoolAdmission, PoolChange, PoolCommand, PoolId, PoolInfo, PoolList, PoolMode,
    Rates,
};

fn rig() -> Rig {
    Rig::new(Sizes { max_pools: 4, ..Sizes::default() })
}

fn make(tokens: Vec<u32>, spec: MakePool) -> GenerateRequest {
    GenerateRequest { make_pool: Some(spec), ..request(tokens, 0) }
}

fn made(mut running: Running) -> Result<PoolInfo, EngineError> {
    loop {
        match running.next().expect("the engine answers") {
            Event::Pool(info) => return Ok(*info),
            Event::Failed(error) => return Err(error),
            _ => {}
        }
    }
}

fn pool(rig: &Rig, tokens: Vec<u32>) -> PoolId {
    made(rig.start(make(tokens, MakePool::default()))).unwrap().id
}

fn child(rig: &Rig, tokens: Vec<u32>, parent: PoolId, branch_pos: Option<usize>) -> Result<PoolInfo, EngineError> {
    made(rig.start(make(tokens, MakePool { parent: Some((parent, branch_pos)), ..MakePool::default() })))
}

fn list(rig: &Rig) -> PoolList {
    rig.ask(|reply| Command::Pool(PoolCommand::List(reply)))
}

fn get(rig: &Rig, id: PoolId) -> Result<PoolInfo, EngineError> {
    rig.ask(|reply| Command::Pool(PoolCommand::Get(id, reply)))
}

fn change(rig: &Rig, id: PoolId, change: PoolChange) -> PoolInfo {
    rig.ask(|reply| Command::Pool(PoolCommand::Change(id, change, reply))).unwrap()
}

fn capacity(rig: &Rig, id: PoolId, expected: Option<u64>) -> Capacity {
    rig.ask(|reply| Command::Pool(PoolCommand::Capacity(id, expected, reply))).unwrap()
}

fn rates(rig: &Rig) -> Rates {
    rig.ask(|reply| Command::Pool(PoolCommand::Rates(reply)))
}

/// A request of a session that begins with `head`.
fn turn(pool: PoolId, session: &str, head: &[u32], seed: u64) -> GenerateRequest {
    let tokens = [head, &prompt(seed, 20)].concat();
    GenerateRequest { pool: Some(pool), session_id: Some(session.to_owned()), ..request(tokens, 8) }
}

fn sharing_is_seen(sizes: Sizes) {
    let rig = Rig::new(Sizes { max_pools: 4, ..sizes });
    let document = prompt(1, 874 % 700);
    let id = pool(&rig, document.clone());
    for (session, seed) in [("a", 5), ("b", 6)] {
        let answer = rig.answer(turn(id, session, &document, seed));
        assert_eq!(answer.finish.timings.cache_n as usize, document.len(), "{session}");
        assert_eq!(answer.finish.timings.prompt_n, 20, "{session}");
    }
    // Without the cache's prefixes the pool's is shared all the same.
    let fresh = GenerateRequest { cache_prompt: false, ..turn(id, "c", &document, 7) };
    assert_eq!(rig.answer(fresh).finish.timings.cache_n as usize, document.len());
    let info = get(&rig, id).unwrap();
    assert_eq!((info.hits, info.n_sessions, info.prefix_len), (3, 3, document.len()));
    change(&rig, id, PoolChange::Release);
    rig.close();
}

#[test]
fn sessions_begin_with_their_pool() {
    sharing_is_seen(Sizes::default());
}

#[test]
fn with_a_sliding_window_too() {
    sharing_is_seen(Sizes { window: Some(100), ..Sizes::default() });
}

#[test]
fn with_recurrent_state_at_the_boundary_exactly() {
    sharing_is_seen(Sizes { states: Some(9), ..Sizes::default() });
}

#[test]
fn a_pool_outlives_whatever_the_cache_evicts() {
    let rig = Rig::new(Sizes { capacity: 1024, max_pools: 1, ..Sizes::default() });
    let id = pool(&rig, prompt(1, 200));
    for seed in 10..20 {
        rig.answer(request(prompt(seed, 500), 4));
    }
    assert_eq!(rig.answer(turn(id, "a", &prompt(1, 200), 3)).finish.timings.cache_n, 200);
    rig.close();
}

#[test]
fn a_fork_is_exact_to_the_token_and_may_branch_before_the_end() {
    let rig = rig();
    let root = prompt(1, 300);
    let parent = pool(&rig, root.clone());
    let longer = [&root[..], &prompt(2, 50)].concat();
    let whole = child(&rig, longer.clone(), parent, None).unwrap();
    assert_eq!((whole.parent, whole.branch_pos, whole.prefix_len), (Some(parent), 300, 350));
    let branch = [&root[..177], &prompt(3, 50)].concat();
    let early = child(&rig, branch.clone(), parent, Some(177)).unwrap();
    assert_eq!((early.branch_pos, early.prefix_len), (177, 227));
    assert_eq!(get(&rig, parent).unwrap().children, [whole.id, early.id]);
    assert_eq!(list(&rig).depth, 2);
    let refused = |tokens: Vec<u32>, at| child(&rig, tokens, parent, at).unwrap_err().to_string();
    assert!(refused(prompt(2, 50), None).contains("child prefix shorter than branch_pos"));
    assert!(refused(branch.clone(), None).contains("differs") || refused(branch, None).contains("shorter"));
    assert!(refused(longer, Some(301)).contains("branch_pos is 301"));
    rig.close();
}

#[test]
fn a_pool_goes_once_it_is_released_and_nothing_refers_to_it() {
    let rig = rig();
    let root = pool(&rig, prompt(1, 100));
    let leaf = child(&rig, [prompt(1, 100), prompt(2, 30)].concat(), root, None).unwrap().id;
    change(&rig, root, PoolChange::Release);
    assert!(get(&rig, root).unwrap().released, "its child keeps it");
    change(&rig, leaf, PoolChange::Pin);
    change(&rig, leaf, PoolChange::Release);
    assert!(get(&rig, leaf).unwrap().orphaned_pin, "a pin keeps it");
    change(&rig, leaf, PoolChange::Unpin);
    assert!(matches!(get(&rig, leaf), Err(EngineError::NotFound(_))));
    assert!(list(&rig).pools.is_empty(), "the parent goes with its last child");
    rig.close();
}

#[test]
fn a_running_request_keeps_its_pool_and_a_released_pool_takes_no_new_session() {
    let mut rig = Rig::new(Sizes { max_pools: 1, held: true, n_ctx: 4096, ..Sizes::default() });
    let making = rig.start(make(prompt(1, 100), MakePool::default()));
    rig.permit(2);
    let id = made(making).unwrap().id;
    let mut running = rig.start(GenerateRequest { n_predict: Some(40), ..turn(id, "a", &prompt(1, 100), 2) });
    rig.permit(3);
    assert!(matches!(running.next(), Some(Event::Started { .. })));
    let released = rig.start(request(prompt(9, 3), 1));
    rig.let_go();
    let info = change(&rig, id, PoolChange::Release);
    assert!(info.released);
    let late = rig.start(turn(id, "b", &prompt(1, 100), 3)).answer();
    assert!(matches!(late, Err(EngineError::NotFound(_))), "{late:?}");
    assert_eq!(running.answer().unwrap().tokens.len(), 40);
    released.answer().unwrap();
    assert!(list(&rig).pools.is_empty());
    rig.close();
}

#[test]
fn pools_are_counted_and_one_too_many_says_what_to_do() {
    let rig = Rig::new(Sizes { max_pools: 1, ..Sizes::default() });
    let id = pool(&rig, prompt(1, 50));
    let full = made(rig.start(make(prompt(2, 50), MakePool::default())));
    assert!(matches!(&full, Err(EngineError::Conflict(text)) if text.contains("release one")), "{full:?}");
    change(&rig, id, PoolChange::Release);
    made(rig.start(make(prompt(2, 50), MakePool { ephemeral: true, ..MakePool::default() }))).unwrap();
    let soon = made(rig.start(make(prompt(3, 50), MakePool::default())));
    assert!(matches!(soon, Err(EngineError::Rejected { .. })), "an ephemeral one will go");
    rig.close();
}

#[test]
fn a_pool_is_captured_from_a_session_or_a_slot() {
    for sizes in [
        Sizes::default(),
        Sizes { window: Some(100), ..Sizes::default() },
        Sizes { states: Some(9), ..Sizes::default() },
    ] {
        let rig = Rig::new(Sizes { max_pools: 4, ..sizes });
        let ask = GenerateRequest { session_id: Some("a".to_owned()), ..request(prompt(1, 200), 10) };
        let answer = rig.answer(ask);
        let capture = |from, len| {
            let capture = Capture { from, len, pinned: false, ephemeral: true };
            rig.ask(|reply| Command::Pool(PoolCommand::Capture(capture, reply)))
        };
        let of_session = capture(Origin::Session("a".to_owned()), None).unwrap();
        assert_eq!((of_session.prefix_len, of_session.ephemeral), (209, true));
        let of_slot = capture(Origin::Slot(answer.finish.id_slot), Some(209)).unwrap();
        assert_eq!(of_slot.prefix_hash, of_session.prefix_hash);
        let held = [prompt(1, 200), answer.tokens[..9].to_vec()].concat();
        assert_eq!(rig.answer(turn(of_session.id, "b", &held, 4)).finish.timings.cache_n, 209);
        assert!(matches!(capture(Origin::Session("none".to_owned()), None), Err(EngineError::NotFound(_))));
        assert!(matches!(capture(Origin::Slot(77), None), Err(EngineError::NotFound(_))));
        assert!(matches!(
            capture(Origin::Session("a".to_owned()), Some(999)),
            Err(EngineError::Invalid { field: Some(field), .. }) if field == "expect_len"
        ));
        rig.close();
    }
}

#[test]
fn a_slot_is_shared_by_hand() {
    for sizes in [Sizes::default(), Sizes { states: Some(9), ..Sizes::default() }] {
        let rig = Rig::new(sizes);
        let document = prompt(1, 300);
        rig.answer(GenerateRequest { id_slot: Some(0), ..request(document.clone(), 0) });
        for slot in [1, 2] {
            let tokens = [&document[..], &prompt(u64::from(slot), 20)].concat();
            let shared_slot = Some(SharedSlot { slot: 0, tokens: 300 });
            let ask = GenerateRequest { id_slot: Some(slot), shared_slot, ..request(tokens, 4) };
            assert_eq!(rig.answer(ask).finish.timings.cache_n, 300, "slot {slot}");
        }
        let nowhere = Some(SharedSlot { slot: 9, tokens: 300 });
        let refused = rig.start(GenerateRequest { shared_slot: nowhere, ..request(document, 4) }).answer();
        assert!(matches!(refused, Err(EngineError::Invalid { field: Some(field), .. }) if field == "shared_pool_slot"));
        rig.close();
    }
}

#[test]
fn a_new_session_waits_until_the_one_before_has_settled() {
    let mut rig = Rig::new(Sizes { max_pools: 1, held: true, ..Sizes::default() });
    let making = rig.start(make(prompt(1, 100), MakePool::default()));
    rig.permit(2);
    let id = made(making).unwrap().id;
    let admission = PoolAdmission {
        mode: PoolMode::Enforced,
        target_tps_per_session: 1.0,
        settle_tokens: 5,
        ..PoolAdmission::default()
    };
    change(&rig, id, PoolChange::Admission(admission));
    let first = rig.start(GenerateRequest { n_predict: Some(30), ..turn(id, "a", &prompt(1, 100), 2) });
    rig.until("the first runs", |slots| slots.iter().any(|s| s.task.as_ref().is_some_and(|t| t.n_decoded >= 1)));
    let second = rig.start(turn(id, "b", &prompt(1, 100), 3));
    let forced = rig.start(GenerateRequest { overcommit: true, ..turn(id, "c", &prompt(1, 100), 4) });
    rig.permit(1);
    rig.until("the forced one runs", |slots| slots.iter().any(|s| s.session_id.as_deref() == Some("c")));
    rig.let_go();
    for running in [first, second, forced] {
        assert!(!running.answer().unwrap().tokens.is_empty());
    }
    rig.close();
}

#[test]
fn a_saturated_pool_refuses_marks_or_lets_in_as_it_is_told() {
    let rig = rig();
    let id = pool(&rig, prompt(1, 100));
    rig.answer(GenerateRequest { n_predict: Some(30), ..turn(id, "a", &prompt(1, 100), 2) });
    let enforce = |on_saturation| {
        let admission = PoolAdmission {
            mode: PoolMode::Enforced,
            target_tps_per_session: f32::MAX,
            on_saturation,
            ..PoolAdmission::default()
        };
        change(&rig, id, PoolChange::Admission(admission));
    };
    enforce(crate::pools::OnSaturation::Reject);
    let now = capacity(&rig, id, None);
    assert!(now.projection.is_idle_estimate && !now.can_admit && !now.guaranteed, "{now:?}");
    let refused = rig.start(turn(id, "b", &prompt(1, 100), 3)).answer();
    assert!(matches!(&refused, Err(EngineError::Rejected { reason: "pool", .. })), "{refused:?}");
    // One that is known goes on.
    rig.answer(turn(id, "a", &prompt(1, 100), 2));
    enforce(crate::pools::OnSaturation::Warn);
    let mut marked = rig.start(turn(id, "b", &prompt(1, 100), 3));
    let Some(Event::Started { notice, .. }) = marked.next() else { panic!("it starts") };
    assert_eq!(notice.saturated, Some(format!("pool-{id}")));
    marked.answer().unwrap();
    rig.close();
}

#[test]
fn capacity_looks_at_the_context_first() {
    let rig = Rig::new(Sizes { capacity: 1024, max_pools: 1, ..Sizes::default() });
    let id = pool(&rig, prompt(1, 100));
    let now = capacity(&rig, id, Some(2000));
    assert_eq!((now.can_admit, now.reason.as_str()), (false, "context headroom exhausted"));
    let now = capacity(&rig, id, Some(100));
    assert!(now.can_admit && now.guaranteed && now.headroom_sessions >= 1, "{now:?}");
    assert!((0.0..=1.0).contains(&now.compaction_pressure));
    rig.answer(GenerateRequest { n_predict: Some(30), ..turn(id, "a", &prompt(1, 100), 2) });
    let session = &rates(&rig).sessions[0];
    assert_eq!((session.session_id.as_deref(), session.active, session.pool), (Some("a"), false, Some(id)));
    assert!(session.tps > 0.0 && session.ctx_used >= 120 && session.ctx_total == 1024);
    rig.close();
}
