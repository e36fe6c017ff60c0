//! Forks, prefixes, windows and the life of sequences.

use opencoti_kv::{Cache, KvError, Prefix};

use crate::support::{config, feed, full_cache, group, plan, swa_cache, tokens};

fn free_pages(cache: &Cache) -> Vec<usize> {
    cache.stats().iter().map(|s| s.free).collect()
}

#[test]
fn a_prefix_is_found_to_the_token_in_any_sequence() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 300));
    let b = cache.create();
    feed(&mut cache, b, &tokens(0, 77));
    let mut prompt = tokens(0, 201);
    prompt.extend([9999; 20]);
    assert_eq!(cache.longest_prefix(&prompt), Some(Prefix { donor: a, tokens: 201 }));
    assert_eq!(cache.longest_prefix(&[4711]), None);
    cache.retain(a).unwrap();
    assert_eq!(cache.longest_prefix(&prompt), Some(Prefix { donor: a, tokens: 201 }));
    cache.evict_lru();
    assert_eq!(cache.longest_prefix(&prompt), Some(Prefix { donor: b, tokens: 77 }));
}

#[test]
fn tokens_of_a_step_are_shared_only_once_it_has_run() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 100));
    let step = plan(&mut cache, &[(a, &tokens(100, 50))]).unwrap();
    assert_eq!(cache.longest_prefix(&tokens(0, 150)), Some(Prefix { donor: a, tokens: 100 }));
    assert!(matches!(cache.fork(a, 120), Err(KvError::CannotShare { asked: 120, .. })));
    // A fork of what is written is possible while the donor goes on.
    let b = cache.fork(a, 100).unwrap();
    cache.commit(step.id).unwrap();
    cache.check().unwrap();
    assert_eq!(cache.tokens(b).unwrap(), tokens(0, 100));
    assert_eq!(cache.longest_prefix(&tokens(0, 150)), Some(Prefix { donor: a, tokens: 150 }));
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let mut cache = swa_cache(100);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 100));
    let before = (free_pages(&cache), cache.page_table(a, 0).unwrap(), cache.page_table(a, 1).unwrap());
    let step = plan(&mut cache, &[(a, &tokens(100, 300))]).unwrap();
    cache.abort(step.id).unwrap();
    cache.check().unwrap();
    assert_eq!((free_pages(&cache), cache.page_table(a, 0).unwrap(), cache.page_table(a, 1).unwrap()), before);
    assert_eq!(cache.tokens(a).unwrap(), tokens(0, 100));
}

#[test]
fn a_sequence_released_in_a_step_goes_when_the_step_ends() {
    let mut cache = full_cache();
    let (a, b) = (cache.create(), cache.create());
    for commit in [true, false] {
        let a = if commit { a } else { b };
        let step = plan(&mut cache, &[(a, &[1, 2, 3])]).unwrap();
        cache.release(a).unwrap();
        assert_eq!(cache.fork(a, 0), Err(KvError::UnknownSequence(a)));
        cache.check().unwrap();
        if commit {
            cache.commit(step.id).unwrap()
        } else {
            cache.abort(step.id).unwrap()
        }
        cache.check().unwrap();
        assert_eq!(cache.tokens(a), Err(KvError::UnknownSequence(a)));
    }
    assert_eq!(free_pages(&cache), [16]);
}

#[test]
fn one_step_at_a_time() {
    let mut cache = full_cache();
    let a = cache.create();
    let first = plan(&mut cache, &[(a, &[1])]).unwrap();
    assert_eq!(plan(&mut cache, &[(a, &[2])]).err(), Some(KvError::StepPending));
    assert_eq!(cache.truncate(a, 0), Err(KvError::InFlight(a)));
    assert_eq!(cache.retain(a), Err(KvError::InFlight(a)));
    cache.commit(first.id).unwrap();
    let second = plan(&mut cache, &[(a, &[2])]).unwrap();
    cache.abort(second.id).unwrap();
}

#[test]
fn a_batch_that_cannot_be_is_refused() {
    let mut cache = full_cache();
    let a = cache.create();
    let b = cache.create();
    assert_eq!(plan(&mut cache, &[(a, &[1]), (b, &[2]), (a, &[3])]).err(), Some(KvError::Twice(a)));
    assert_eq!(plan(&mut cache, &[(a, &[1]), (b, &[])]).err(), Some(KvError::NoTokens(b)));
    let found = Some(KvError::StepTooLarge { found: 513, limit: 512 });
    assert_eq!(plan(&mut cache, &[(a, &[1; 513])]).err(), found);
    feed(&mut cache, a, &[1]);
    cache.retain(a).unwrap();
    assert_eq!(plan(&mut cache, &[(a, &[1])]).err(), Some(KvError::Idle(a)));
    cache.release(b).unwrap();
    assert_eq!(plan(&mut cache, &[(b, &[1])]).err(), Some(KvError::UnknownSequence(b)));
    assert_eq!(cache.release(b), Err(KvError::UnknownSequence(b)));
}

#[test]
fn a_window_that_moved_on_cannot_be_shared_further_back() {
    let mut cache = swa_cache(100);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 600));
    // The window's pages begin at 384: a continuation needs the 99 tokens before it.
    assert_eq!(cache.page_table(a, 1).unwrap()[0].start_pos, 384);
    for (n, tokens_found) in [(600, Some(600)), (483, Some(483)), (482, None), (100, None)] {
        let found = cache.longest_prefix(&tokens(0, n)).map(|p| p.tokens);
        assert_eq!(found, tokens_found, "of the first {n}");
    }
    assert!(matches!(cache.fork(a, 482), Err(KvError::CannotShare { .. })));
    let b = cache.fork(a, 483).unwrap();
    cache.check().unwrap();
    feed(&mut cache, b, &tokens(5000, 300));
    feed(&mut cache, a, &tokens(600, 300));
}

#[test]
fn a_truncation_keeps_nothing_when_the_window_has_moved_on() {
    let mut cache = swa_cache(100);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 600));
    assert_eq!(cache.truncate(a, 599), Ok(599));
    assert_eq!(cache.truncate(a, 700), Ok(599));
    assert_eq!(cache.truncate(a, 300), Ok(0));
    cache.check().unwrap();
    assert!(cache.tokens(a).unwrap().is_empty());
    feed(&mut cache, a, &tokens(0, 10));
}

#[test]
fn the_last_tokens_can_always_be_taken_back() {
    let mut config = config(vec![group("swa", 1, Some(64))]);
    config.rollback_tokens = 10;
    let mut cache = Cache::new(config).unwrap();
    let a = cache.create();
    for n in 1..400u32 {
        feed(&mut cache, a, &[n]);
        let less = (n as usize).saturating_sub(10);
        let b = cache.fork(a, less).unwrap();
        cache.release(b).unwrap();
        assert_eq!(cache.truncate(a, less), Ok(less));
        feed(&mut cache, a, &tokens(less as u32 + 1, n as usize - less));
    }
}

#[test]
fn shared_pages_live_as_long_as_one_sharer() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 300));
    let b = cache.fork(a, 200).unwrap();
    assert_eq!(cache.stats()[0].shared, 2);
    cache.release(a).unwrap();
    cache.check().unwrap();
    assert_eq!(free_pages(&cache), [14]);
    cache.release(b).unwrap();
    assert_eq!(free_pages(&cache), [16]);
}

#[test]
fn idle_sequences_go_least_recently_used_first() {
    let mut cache = full_cache();
    let ids: Vec<_> = (0..3)
        .map(|i| {
            let seq = cache.create();
            feed(&mut cache, seq, &[i, i, i]);
            seq
        })
        .collect();
    for &seq in &ids {
        cache.retain(seq).unwrap();
    }
    // Forking the first makes it the youngest.
    let fork = cache.fork(ids[0], 2).unwrap();
    assert_eq!(cache.evict_lru(), Some(ids[1]));
    assert_eq!(cache.evict_lru(), Some(ids[2]));
    assert_eq!(cache.evict_lru(), Some(ids[0]));
    assert_eq!(cache.evict_lru(), None);
    cache.check().unwrap();
    assert_eq!(cache.tokens(fork).unwrap(), [0, 0]);
}

#[test]
fn idle_sequences_make_room_and_are_bounded_in_number() {
    let mut cache = full_cache();
    for i in 0..6 {
        let seq = cache.create();
        feed(&mut cache, seq, &tokens(1000 * i, 256));
        cache.retain(seq).unwrap();
    }
    assert_eq!(cache.idle_sequences(), 4);
    assert_eq!(cache.stats()[0].reclaimable, 8);
    let big = cache.create();
    feed(&mut cache, big, &tokens(9000, 1400));
    assert_eq!(cache.idle_sequences(), 2);
    assert_eq!(cache.longest_prefix(&tokens(5000, 10)).map(|p| p.tokens), Some(10));
}

#[test]
fn the_tree_of_prefixes_names_each_run_once_with_who_has_it_and_how_often_it_was_shared() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    let b = cache.fork(a, 120).unwrap();
    feed(&mut cache, b, &tokens(1000, 30));
    let c = cache.create();
    feed(&mut cache, c, &tokens(500, 10));
    cache.retain(b).unwrap();
    let tree = cache.prefix_tree();
    let shown: Vec<_> = tree.iter().map(|n| (n.parent, n.from, n.to, n.sequences, n.live, n.hits)).collect();
    assert_eq!(
        shown,
        [(None, 0, 120, 2, 1, 1), (Some(0), 120, 200, 1, 1, 1), (Some(0), 120, 150, 1, 0, 0), (None, 0, 10, 1, 1, 0),]
    );
    // A sequence that ends inside another one's run ends a node.
    let d = cache.fork(a, 60).unwrap();
    assert_eq!(cache.prefix_tree()[0].to, 60);
    cache.release(d).unwrap();
}

#[test]
fn a_sequence_that_is_kept_whole_is_forked_and_not_taken_over() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    cache.retain(a).unwrap();
    cache.keep_whole(a).unwrap();
    let whole = Some(Prefix { donor: a, tokens: 200 });
    let b = cache.admit(whole, 10).unwrap();
    assert_ne!(a, b);
    assert_eq!(cache.prefix_of(a, &tokens(0, 300)), whole);
    cache.check().unwrap();
}
