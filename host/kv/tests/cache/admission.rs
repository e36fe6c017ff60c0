//! Reservations: promised pages are there when they are needed.

use opencoti_kv::{Cache, CacheFull, KvError, Prefix};

use crate::support::{config, feed, full_cache, group, plan, swa_cache, tokens};

fn full(error: KvError) -> CacheFull {
    match error {
        KvError::Full(full) => full,
        other => panic!("expected a full cache, got {other}"),
    }
}

#[test]
fn a_refusal_names_the_store_and_both_figures() {
    let mut cache = full_cache();
    cache.admit(None, 1800).unwrap();
    let refusal = full(cache.admit(None, 200).unwrap_err());
    assert_eq!(refusal, CacheFull { store: "kv".into(), unit: "tokens", asked: 256, free: 128 });
    assert_eq!(refusal.to_string(), "the cache `kv` has room for 128 more tokens, 256 are needed");
    cache.check().unwrap();
    assert_eq!(cache.live_sequences(), 1);
}

#[test]
fn promised_pages_cannot_be_taken_by_others() {
    let mut cache = full_cache();
    let a = cache.admit(None, 1500).unwrap();
    let b = cache.create();
    feed(&mut cache, b, &tokens(0, 512));
    let refusal = full(plan(&mut cache, &[(b, &[1])]).err().unwrap());
    assert_eq!((refusal.asked, refusal.free), (128, 0));
    feed(&mut cache, a, &tokens(0, 1500));
    cache.check().unwrap();
    assert_eq!(cache.stats()[0].promised, 0);
}

#[test]
fn what_was_not_taken_is_given_back() {
    let mut cache = full_cache();
    let a = cache.admit(None, 2048).unwrap();
    feed(&mut cache, a, &tokens(0, 130));
    assert_eq!(cache.stats()[0].promised, 14);
    cache.retain(a).unwrap();
    assert_eq!(cache.stats()[0].promised, 0);
    let b = cache.admit(None, 2048).unwrap();
    cache.check().unwrap();
    feed(&mut cache, b, &tokens(9, 2048));
    assert_eq!(cache.idle_sequences(), 0);
}

#[test]
fn a_shared_prefix_is_not_paid_twice() {
    let mut cache = full_cache();
    let a = cache.admit(None, 1300).unwrap();
    feed(&mut cache, a, &tokens(0, 1280));
    for i in 0..5 {
        let prefix = cache.longest_prefix(&tokens(0, 1280));
        assert_eq!(prefix, Some(Prefix { donor: if i == 0 { a } else { prefix.unwrap().donor }, tokens: 1280 }));
        cache.admit(prefix, 100).unwrap();
    }
    cache.check().unwrap();
    let prefix = cache.longest_prefix(&tokens(0, 1280));
    assert_eq!(full(cache.admit(prefix, 100).unwrap_err()).free, 0);
}

#[test]
fn an_idle_sequence_that_fits_as_a_whole_is_taken_over() {
    let mut cache = full_cache();
    let a = cache.admit(None, 200).unwrap();
    feed(&mut cache, a, &tokens(0, 100));
    cache.retain(a).unwrap();
    let prefix = cache.longest_prefix(&tokens(0, 150));
    let again = cache.admit(prefix, 50).unwrap();
    assert_eq!(again, a);
    // The page has room for 28 of them.
    assert_eq!(cache.stats()[0].promised, 1);
    feed(&mut cache, a, &tokens(100, 50));
    assert_eq!(cache.page_table(a, 0).unwrap().len(), 2);
}

#[test]
fn a_refused_take_over_leaves_the_sequence_idle_and_as_old_as_it_was() {
    let mut cache = full_cache();
    let (a, b) = (cache.create(), cache.create());
    feed(&mut cache, a, &tokens(0, 100));
    feed(&mut cache, b, &tokens(500, 100));
    cache.retain(a).unwrap();
    cache.retain(b).unwrap();
    let prefix = cache.longest_prefix(&tokens(0, 100));
    assert_eq!(full(cache.admit(prefix, 2048).unwrap_err()).store, "kv");
    cache.check().unwrap();
    assert_eq!(cache.evict_lru(), Some(a));
}

#[test]
fn waking_an_idle_prefix_does_not_break_a_promise() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 512));
    cache.retain(a).unwrap();
    // Counts on the pages of the idle one.
    let b = cache.admit(None, 2048).unwrap();
    assert_eq!(full(cache.fork(a, 512).unwrap_err()).asked, 512);
    assert_eq!(full(cache.resume(a).unwrap_err()).asked, 512);
    feed(&mut cache, b, &tokens(7000, 2048));
    assert_eq!(cache.tokens(a), Err(KvError::UnknownSequence(a)));
}

#[test]
fn tokens_taken_back_may_be_written_again() {
    let mut cache = full_cache();
    let a = cache.admit(None, 512).unwrap();
    let b = cache.admit(None, 1536).unwrap();
    for _ in 0..3 {
        feed(&mut cache, a, &tokens(0, 512));
        assert_eq!(cache.truncate(a, 0), Ok(0));
        cache.check().unwrap();
        let step = plan(&mut cache, &[(a, &tokens(0, 300))]).unwrap();
        cache.abort(step.id).unwrap();
    }
    feed(&mut cache, a, &tokens(0, 512));
    feed(&mut cache, b, &tokens(0, 1536));
}

#[test]
fn a_window_is_promised_once_however_long_the_sequence_gets() {
    let mut config = config(vec![group("swa", 1, Some(100))]);
    config.capacity_tokens = 1 << 14;
    let mut cache = Cache::new(config).unwrap();
    let all: Vec<_> = (0..4).map(|_| cache.admit(None, 5000).unwrap()).collect();
    for round in 0..10 {
        for &seq in &all {
            feed(&mut cache, seq, &tokens(round * 500, 500));
        }
    }
    assert_eq!(cache.live_sequences(), 4);
}

#[test]
fn forks_that_go_their_own_way_do_not_starve_their_donor_of_its_window() {
    let mut cache = swa_cache(400);
    let a = cache.admit(None, 1200).unwrap();
    feed(&mut cache, a, &tokens(0, 500));
    let forks: Vec<_> = (0..3).map(|_| cache.admit(Some(Prefix { donor: a, tokens: 500 }), 100).unwrap()).collect();
    // The forks keep the old window alive while the donor leaves it.
    feed(&mut cache, a, &tokens(500, 700));
    for (i, &fork) in forks.iter().enumerate() {
        feed(&mut cache, fork, &tokens(i as u32 * 1000, 100));
    }
    cache.check().unwrap();
}

#[test]
fn a_full_cache_refuses_a_step_and_changes_nothing() {
    let mut cache = full_cache();
    let (a, b) = (cache.create(), cache.create());
    feed(&mut cache, a, &tokens(0, 1900));
    let before = cache.stats();
    let refusal = full(plan(&mut cache, &[(b, &tokens(0, 100)), (a, &tokens(0, 100))]).err().unwrap());
    assert_eq!((refusal.asked, refusal.free), (256, 128));
    assert_eq!(cache.stats(), before);
    assert!(cache.tokens(b).unwrap().is_empty());
    cache.check().unwrap();
    feed(&mut cache, b, &tokens(0, 100));
}

#[test]
fn free_slots_that_a_promise_counts_on_are_not_lost_to_a_fork() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 100));
    let b = cache.fork(a, 90).unwrap();
    cache.release(a).unwrap();
    // Now the only holder of its page, with 38 free slots.
    cache.reserve(b, 38).unwrap();
    assert_eq!(cache.stats()[0].promised, 0);
    cache.fork(b, 90).unwrap();
    let rest = cache.create();
    feed(&mut cache, rest, &tokens(0, 15 * 128));
    feed(&mut cache, b, &tokens(0, 38));
    assert_eq!(cache.page_table(b, 0).unwrap().len(), 1);
}

#[test]
fn a_prompt_that_fills_the_cache_can_be_answered_again() {
    for n in [1999, 1, 2000] {
        let mut cache = full_cache();
        let a = cache.admit(None, 2048).unwrap();
        feed(&mut cache, a, &tokens(0, 2040));
        cache.retain(a).unwrap();
        let prefix = cache.longest_prefix(&tokens(0, n)).unwrap();
        assert_eq!(prefix.tokens, n);
        // A fork would need a seventeenth page.
        let b = cache.admit(Some(prefix), 2048 - n).unwrap();
        cache.check().unwrap();
        let shared = cache.committed(b).unwrap();
        feed(&mut cache, b, &tokens(shared as u32, 2048 - shared));
        cache.check().unwrap();
    }
}

#[test]
fn a_prefix_in_pages_cut_short_is_given_up_when_it_leaves_no_room() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 10));
    let mut last = a;
    for i in 1..10 {
        let next = cache.fork(last, 10 * i).unwrap();
        feed(&mut cache, next, &tokens(10 * i as u32, 10));
        cache.release(last).unwrap();
        last = next;
    }
    cache.retain(last).unwrap();
    let prefix = cache.longest_prefix(&tokens(0, 90)).unwrap();
    let b = cache.admit(Some(prefix), 2048 - 90).unwrap();
    assert_eq!(cache.committed(b), Ok(0));
    feed(&mut cache, b, &tokens(0, 2048));
}
