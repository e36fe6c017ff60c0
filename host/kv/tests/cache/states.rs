//! Recurrent state: planes, roll-back, snapshots.

use opencoti_kv::{Cache, CacheConfig, KvError, Prefix, SeqId};

use crate::fold::{check, hybrid, run, states, step};
use crate::support::{config, feed, group, plan, tokens};

fn positions(cache: &Cache, seq: SeqId) -> Vec<usize> {
    cache.planes(seq).unwrap().into_iter().map(|(at, _)| at).collect()
}

fn used(cache: &Cache) -> usize {
    let stats = cache.state_stats().unwrap();
    stats.total - stats.free
}

/// Everything ends, and every plane and page is free.
fn close(mut cache: Cache, live: &[SeqId]) {
    live.iter().for_each(|&seq| cache.release(seq).unwrap());
    while cache.evict_lru().is_some() {}
    cache.check().unwrap();
    let stats = cache.state_stats().unwrap();
    assert_eq!((stats.free, stats.promised, stats.available), (stats.total, 0, stats.total));
    assert!(cache.stats().iter().all(|s| s.free == s.total));
}

#[test]
fn a_sequence_goes_on_by_exchanging_two_planes() {
    let mut cache = Cache::new(hybrid(0, 0)).unwrap();
    let seq = cache.admit(None, 100).unwrap();
    let mut seen = Vec::new();
    for i in 0..6 {
        step(&mut cache, &[(seq, &tokens(i * 10, 10))]);
        assert_eq!(used(&cache), 1);
        seen.push(cache.planes(seq).unwrap()[0].1);
    }
    assert!(seen.windows(2).all(|w| w[0] != w[1]) && seen[0] == seen[2] && seen[1] == seen[3], "{seen:?}");
    close(cache, &[seq]);
}

#[test]
fn every_accepted_length_is_rolled_back_to_exactly() {
    for k in 0..5 {
        for accepted in 0..=k {
            let mut cache = Cache::new(hybrid(k, 0)).unwrap();
            let seq = cache.admit(None, 300).unwrap();
            step(&mut cache, &[(seq, &tokens(0, 200))]);
            step(&mut cache, &[(seq, &tokens(500, k + 1))]);
            assert_eq!(positions(&cache, seq), (201..=201 + k).collect::<Vec<_>>());
            assert_eq!(cache.truncate(seq, 201 + accepted).unwrap(), 201 + accepted);
            check(&cache, seq);
            step(&mut cache, &[(seq, &tokens(900, k + 1))]);
            assert_eq!(used(&cache), k + 1, "k = {k}, accepted = {accepted}");
            close(cache, &[seq]);
        }
    }
}

#[test]
fn roll_back_reaches_over_several_steps() {
    let mut cache = Cache::new(hybrid(4, 0)).unwrap();
    let seq = cache.admit(None, 300).unwrap();
    step(&mut cache, &[(seq, &tokens(0, 50))]);
    (0..3).for_each(|i| step(&mut cache, &[(seq, &[70 + i])]));
    assert_eq!(positions(&cache, seq), [49, 50, 51, 52, 53]);
    assert_eq!(cache.truncate(seq, 49).unwrap(), 49);
    check(&cache, seq);
    close(cache, &[seq]);
}

#[test]
fn a_truncation_without_a_plane_says_where_it_ended() {
    let mut cache = Cache::new(hybrid(1, 4)).unwrap();
    let seq = cache.admit(None, 300).unwrap();
    cache.keep_snapshots(seq, &[60, 120]).unwrap();
    step(&mut cache, &[(seq, &tokens(0, 100))]);
    step(&mut cache, &[(seq, &tokens(100, 100))]);
    assert_eq!(cache.truncate(seq, 150).unwrap(), 120);
    check(&cache, seq);
    assert_eq!(cache.tokens(seq).unwrap(), tokens(0, 120));
    assert_eq!(cache.truncate(seq, 119).unwrap(), 60);
    check(&cache, seq);
    step(&mut cache, &[(seq, &[7, 8, 9])]);
    assert_eq!(cache.truncate(seq, 59).unwrap(), 0);
    assert!(positions(&cache, seq).is_empty());
    step(&mut cache, &[(seq, &[7])]);
    close(cache, &[seq]);
}

#[test]
fn an_aborted_step_leaves_state_and_counts_as_they_were() {
    let mut cache = Cache::new(hybrid(2, 4)).unwrap();
    let seq = cache.admit(None, 300).unwrap();
    cache.keep_snapshots(seq, &[20, 60]).unwrap();
    let planned = plan(&mut cache, &[(seq, &tokens(0, 90))]).unwrap();
    assert_eq!(planned.step.state_runs[0].from, None);
    cache.abort(planned.id).unwrap();
    cache.check().unwrap();
    assert_eq!((used(&cache), cache.snapshots()), (0, 0));
    step(&mut cache, &[(seq, &tokens(0, 90))]);
    let before = (cache.planes(seq).unwrap(), used(&cache), cache.snapshots());
    assert_eq!(before.2, 2);
    let planned = plan(&mut cache, &[(seq, &tokens(90, 1))]).unwrap();
    run(&planned.step);
    cache.abort(planned.id).unwrap();
    cache.check().unwrap();
    // What a longer sequence could not have been taken back to is given up when the step is planned.
    assert_eq!(cache.planes(seq).unwrap(), before.0[1..]);
    check(&cache, seq);
    close(cache, &[seq]);
}

#[test]
fn interleaved_sequences_keep_their_own_state() {
    let mut cache = Cache::new(hybrid(2, 0)).unwrap();
    let (a, b) = (cache.admit(None, 300).unwrap(), cache.admit(None, 300).unwrap());
    step(&mut cache, &[(a, &tokens(0, 30)), (b, &tokens(1000, 3))]);
    step(&mut cache, &[(b, &tokens(2000, 40))]);
    step(&mut cache, &[(b, &[5]), (a, &[6])]);
    assert_eq!((cache.committed(a).unwrap(), cache.committed(b).unwrap()), (31, 44));
    close(cache, &[a, b]);
}

#[test]
fn forks_share_a_plane_until_they_go_on() {
    let mut cache = Cache::new(hybrid(0, 0)).unwrap();
    let a = cache.admit(None, 300).unwrap();
    step(&mut cache, &[(a, &tokens(0, 130))]);
    assert!(matches!(cache.fork(a, 129), Err(KvError::CannotShare { asked: 129, .. })));
    let children = [cache.fork(a, 130).unwrap(), cache.fork(a, 130).unwrap()];
    assert_eq!((used(&cache), cache.state_stats().unwrap().shared), (1, 1));
    let planned = plan(&mut cache, &[(children[0], &[1]), (children[1], &[2]), (a, &[3])]).unwrap();
    assert!(planned.step.state_runs.iter().all(|r| r.from == planned.step.state_runs[0].from));
    run(&planned.step);
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
    children.iter().for_each(|&seq| check(&cache, seq));
    assert_eq!(used(&cache), 3);
    cache.release(a).unwrap();
    step(&mut cache, &[(children[1], &[4])]);
    close(cache, &children);
}

/// Prefills a prompt as an engine would, with snapshots at `wanted`; returns the tokens that were there already.
fn serve(cache: &mut Cache, prompt: &[u32], wanted: &[usize]) -> (SeqId, usize) {
    let prefix = cache.longest_prefix(&prompt[..prompt.len() - 1]);
    let shared = prefix.map_or(0, |p| p.tokens);
    let seq = cache.admit(prefix, prompt.len() - shared + 50).unwrap();
    assert_eq!(cache.committed(seq).unwrap(), shared);
    cache.keep_snapshots(seq, wanted).unwrap();
    for chunk in prompt[shared..].chunks(100) {
        step(cache, &[(seq, chunk)]);
    }
    (seq, shared)
}

fn with_tail(n: usize, tail: u32) -> Vec<u32> {
    let mut prompt = tokens(0, n);
    prompt.extend([tail; 40]);
    prompt
}

#[test]
fn a_prompt_is_reused_where_a_snapshot_of_it_was_kept() {
    let mut cache = Cache::new(hybrid(0, 8)).unwrap();
    let prompt = tokens(0, 300);
    let (first, shared) = serve(&mut cache, &prompt, &[299]);
    assert_eq!(shared, 0);
    (0..20).for_each(|i| step(&mut cache, &[(first, &[5000 + i])]));
    cache.retain(first).unwrap();
    // The same prompt again, while the first one's answer is kept too; and the next turn of the conversation.
    let (again, shared) = serve(&mut cache, &prompt, &[299]);
    assert_eq!((shared, cache.snapshots()), (299, 1));
    let mut turn = prompt.clone();
    turn.extend(tokens(5000, 20));
    turn.extend(tokens(9000, 30));
    let (next, shared) = serve(&mut cache, &turn, &[]);
    assert_eq!(shared, 320);
    close(cache, &[again, next]);
}

#[test]
fn many_requests_share_a_common_beginning() {
    let mut cache = Cache::new(hybrid(0, 8)).unwrap();
    let (first, _) = serve(&mut cache, &with_tail(200, 1), &[200]);
    cache.retain(first).unwrap();
    for tail in 2..8 {
        let (seq, shared) = serve(&mut cache, &with_tail(200, tail), &[200]);
        assert_eq!(shared, 200);
        cache.retain(seq).unwrap();
    }
    assert_eq!(cache.snapshots(), 1);
    assert_eq!(cache.longest_prefix(&tokens(0, 250)).unwrap().tokens, 200);
    assert_eq!(cache.longest_prefix(&tokens(0, 199)), None);
    close(cache, &[]);
}

#[test]
fn the_snapshots_used_least_recently_go_first() {
    let mut cache = Cache::new(hybrid(0, 3)).unwrap();
    let seq = cache.admit(None, 600).unwrap();
    cache.keep_snapshots(seq, &[50, 100, 150, 200, 250]).unwrap();
    step(&mut cache, &[(seq, &tokens(0, 300))]);
    cache.release(seq).unwrap();
    assert_eq!(cache.snapshots(), 3);
    let found = |cache: &Cache, n| cache.longest_prefix(&tokens(0, n)).map(|p| p.tokens);
    assert_eq!([found(&cache, 149), found(&cache, 199), found(&cache, 299)], [None, Some(150), Some(250)]);
    // Used now, the oldest one outlives the others.
    let prefix = cache.longest_prefix(&tokens(0, 199));
    let fork = cache.admit(prefix, 100).unwrap();
    cache.keep_snapshots(fork, &[160]).unwrap();
    step(&mut cache, &[(fork, &[7; 20])]);
    assert_eq!([found(&cache, 199), found(&cache, 249)], [Some(150), Some(150)]);
    close(cache, &[fork]);
}

#[test]
fn a_snapshot_for_which_there_is_no_plane_is_not_made() {
    let states = states(0, 0);
    let config = CacheConfig { slots: 1, snapshots: 8, states, ..config(vec![group("kv", 1, None)]) };
    let mut cache = Cache::new(config).unwrap();
    let seq = cache.admit(None, 300).unwrap();
    cache.keep_snapshots(seq, &[50, 60, 70]).unwrap();
    step(&mut cache, &[(seq, &tokens(0, 90))]);
    // Two planes: one written by every step, one for a snapshot until the next step needs it.
    assert_eq!(cache.snapshots(), 1);
    step(&mut cache, &[(seq, &[1])]);
    assert_eq!(cache.snapshots(), 0);
    close(cache, &[seq]);
}

#[test]
fn planes_are_promised_and_refused_by_name() {
    let config = CacheConfig { slots: 2, states: states(1, 0), ..config(vec![group("kv", 1, None)]) };
    let mut cache = Cache::new(config).unwrap();
    let a = cache.admit(None, 10).unwrap();
    assert_eq!(cache.state_stats().unwrap().available, 3);
    let b = cache.create();
    step(&mut cache, &[(b, &tokens(0, 5))]);
    let refusal = cache.admit(None, 10).unwrap_err().to_string();
    assert_eq!(refusal, "the cache `state` has room for 1 more states, 3 are needed");
    cache.check().unwrap();
    // What is idle makes room.
    cache.retain(b).unwrap();
    let c = cache.admit(None, 10).unwrap();
    step(&mut cache, &[(a, &tokens(0, 5)), (c, &tokens(9, 5))]);
    step(&mut cache, &[(a, &tokens(0, 5)), (c, &tokens(9, 5))]);
    assert_eq!(cache.idle_sequences(), 0);
    let d = cache.create();
    assert!(matches!(plan(&mut cache, &[(d, &[1])]), Err(KvError::Full(full)) if full.unit == "states"));
    close(cache, &[a, c, d]);
}

#[test]
fn windows_and_state_allow_only_what_both_do() {
    let groups = vec![group("kv", 1, None), group("swa", 1, Some(100))];
    let mut cache = Cache::new(CacheConfig { snapshots: 8, states: states(1, 8), ..config(groups) }).unwrap();
    let (seq, _) = serve(&mut cache, &tokens(0, 700), &[250, 699]);
    cache.retain(seq).unwrap();
    assert_eq!(cache.longest_prefix(&tokens(0, 300)).map(|p| p.tokens), Some(250));
    let (again, shared) = serve(&mut cache, &tokens(0, 700), &[]);
    assert_eq!(shared, 699);
    assert_eq!(cache.truncate(again, 698).unwrap(), 0, "a plane of 250 tokens is there, but no window");
    close(cache, &[again]);
}

#[test]
fn a_sliding_window_is_reused_at_its_snapshots_however_long_the_answer() {
    let groups = vec![group("kv", 1, None), group("swa", 1, Some(100))];
    let mut cache = Cache::new(CacheConfig { snapshots: 8, ..config(groups) }).unwrap();
    let seq = cache.admit(None, 1000).unwrap();
    cache.keep_snapshots(seq, &[299]).unwrap();
    feed(&mut cache, seq, &tokens(0, 300));
    feed(&mut cache, seq, &tokens(5000, 500));
    cache.retain(seq).unwrap();
    let prefix = cache.longest_prefix(&tokens(0, 299)).unwrap();
    assert_eq!(prefix.tokens, 299);
    let again = cache.admit(Some(prefix), 10).unwrap();
    feed(&mut cache, again, &[1, 2, 3]);
    cache.release(again).unwrap();
    assert_eq!(cache.longest_prefix(&tokens(0, 299)), Some(Prefix { donor: prefix.donor, tokens: 299 }));
    while cache.evict_lru().is_some() {}
    assert!(cache.stats().iter().all(|s| s.free == s.total));
}
