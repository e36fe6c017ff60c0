//! Plans as text.

use expect_test::{Expect, expect};
use opencoti_kv::{BatchItem, Cache, CacheConfig, KvError, Outputs, SeqId};

use crate::support::{config, encoder_cache, feed, full_cache, group, plan, swa_cache, text, tokens};

/// Plans the step, compares it and commits it.
fn check(cache: &mut Cache, batch: &[(SeqId, &[u32])], expected: Expect) {
    let planned = plan(cache, batch).unwrap();
    expected.assert_eq(&text(&planned));
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
}

#[test]
fn a_prompt_fills_pages_in_order() {
    let mut cache = full_cache();
    let a = cache.create();
    check(
        &mut cache,
        &[(a, &tokens(0, 300))],
        expect![[r#"
        group 0
        write rows 0..128 store 0 p0[0..128]
        write rows 128..256 store 0 p1[0..128]
        write rows 256..300 store 0 p2[0..44]
        read  rows 0..300 store 0 [p0@0+128 p1@128+128 p2@256+44] causal
    "#]],
    );
    check(
        &mut cache,
        &[(a, &[7])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p2[44..45]
        read  rows 0..1 store 0 [p0@0+128 p1@128+128 p2@256+45] causal
    "#]],
    );
}

#[test]
fn a_fork_in_the_middle_of_a_page_reads_its_part_and_goes_on_in_its_own() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    let b = cache.fork(a, 150).unwrap();
    check(
        &mut cache,
        &[(b, &[1, 2])],
        expect![[r#"
        group 0
        write rows 0..2 store 0 p2[0..2]
        read  rows 0..2 store 0 [p0@0+128 p1@128+22 p2@150+2] causal
    "#]],
    );
    // The donor's page is still its own.
    check(
        &mut cache,
        &[(a, &[3]), (b, &[4])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p1[72..73]
        write rows 1..2 store 0 p2[2..3]
        read  rows 0..2 store 0 [p0@0+128] causal
        read  rows 0..1 store 0 [p1@128+73] causal
        read  rows 1..2 store 0 [p1@128+22 p2@150+3] causal
    "#]],
    );
}

#[test]
fn three_sequences_read_their_common_prefix_once() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 256));
    let b = cache.fork(a, 256).unwrap();
    let c = cache.fork(a, 256).unwrap();
    check(
        &mut cache,
        &[(a, &[1]), (b, &[2]), (c, &[3])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p2[0..1]
        write rows 1..2 store 0 p3[0..1]
        write rows 2..3 store 0 p4[0..1]
        read  rows 0..3 store 0 [p0@0+128 p1@128+128] causal
        read  rows 0..1 store 0 [p2@256+1] causal
        read  rows 1..2 store 0 [p3@256+1] causal
        read  rows 2..3 store 0 [p4@256+1] causal
    "#]],
    );
    // Two of them share more than the third.
    let d = cache.fork(b, 257).unwrap();
    check(
        &mut cache,
        &[(a, &[1]), (b, &[2]), (d, &[3])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p2[1..2]
        write rows 1..2 store 0 p3[1..2]
        write rows 2..3 store 0 p5[0..1]
        read  rows 0..3 store 0 [p0@0+128 p1@128+128] causal
        read  rows 0..1 store 0 [p2@256+2] causal
        read  rows 1..2 store 0 [p3@256+2] causal
        read  rows 2..3 store 0 [p3@256+1 p5@257+1] causal
    "#]],
    );
}

#[test]
fn a_donor_that_is_read_to_another_length_keeps_its_last_page_to_itself() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    let b = cache.fork(a, 180).unwrap();
    let c = cache.fork(a, 180).unwrap();
    check(
        &mut cache,
        &[(a, &[1]), (b, &[2]), (c, &[3])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p1[72..73]
        write rows 1..2 store 0 p2[0..1]
        write rows 2..3 store 0 p3[0..1]
        read  rows 0..3 store 0 [p0@0+128] causal
        read  rows 0..1 store 0 [p1@128+73] causal
        read  rows 1..3 store 0 [p1@128+52] causal
        read  rows 1..2 store 0 [p2@180+1] causal
        read  rows 2..3 store 0 [p3@180+1] causal
    "#]],
    );
}

#[test]
fn a_page_that_left_the_window_is_not_read_and_is_given_back() {
    let mut cache = swa_cache(100);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 227));
    assert_eq!(cache.page_table(a, 1).unwrap().len(), 2);
    // The query at 227 sees keys from 128 on.
    check(
        &mut cache,
        &[(a, &[1])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p1[99..100]
        read  rows 0..1 store 0 [p0@0+128 p1@128+100] causal
        group 1
        write rows 0..1 store 1 p1[99..100]
        read  rows 0..1 store 1 [p1@128+100] window 100
    "#]],
    );
    assert_eq!(cache.page_table(a, 1).unwrap().len(), 1);
    assert_eq!(cache.page_table(a, 0).unwrap().len(), 2);
}

#[test]
fn a_truncated_sequence_writes_the_same_slots_again() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    assert_eq!(cache.truncate(a, 140), Ok(140));
    check(
        &mut cache,
        &[(a, &[1])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p1[12..13]
        read  rows 0..1 store 0 [p0@0+128 p1@128+13] causal
    "#]],
    );
}

#[test]
fn slots_that_a_fork_reads_are_never_written_again() {
    let mut cache = full_cache();
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 100));
    let b = cache.fork(a, 80).unwrap();
    assert_eq!(cache.truncate(a, 50), Ok(50));
    check(
        &mut cache,
        &[(a, &[1])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p1[0..1]
        read  rows 0..1 store 0 [p0@0+50 p1@50+1] causal
    "#]],
    );
    cache.release(a).unwrap();
    // Now nobody else reads the first page.
    check(
        &mut cache,
        &[(b, &[2])],
        expect![[r#"
        group 0
        write rows 0..1 store 0 p0[80..81]
        read  rows 0..1 store 0 [p0@0+81] causal
    "#]],
    );
}

#[test]
fn texts_of_an_encoder_read_all_of_themselves_and_nothing_else() {
    let mut cache = encoder_cache();
    let (a, b) = (cache.create(), cache.create());
    check(
        &mut cache,
        &[(a, &tokens(0, 200)), (b, &tokens(0, 5))],
        expect![[r#"
        group 0
        write rows 0..128 store 0 p0[0..128]
        write rows 128..200 store 0 p1[0..72]
        write rows 200..205 store 0 p2[0..5]
        read  rows 0..200 store 0 [p0@0+128 p1@128+72] full
        read  rows 200..205 store 0 [p2@0+5] full
    "#]],
    );
    assert_eq!(plan(&mut cache, &[(a, &[1])]).err(), Some(KvError::Whole(a)));
    assert!(cache.fork(b, 5).unwrap_err().to_string().contains("each of its tokens has seen all of them"));
    assert_eq!(cache.longest_prefix(&tokens(0, 200)), None);
    for seq in [a, b] {
        cache.release(seq).unwrap();
    }
    assert!(cache.stats().iter().all(|s| s.free == s.total));
}

#[test]
fn an_encoder_has_no_sliding_window() {
    let windowed = CacheConfig { whole_texts: true, ..config(vec![group("swa", 1, Some(8))]) };
    let error = Cache::new(windowed).err().unwrap().to_string();
    assert!(error.contains("`swa` has a sliding window"), "{error}");
}

#[test]
fn hidden_states_are_wanted_of_more_rows_than_logits() {
    let mut cache = full_cache();
    let outputs = [Outputs::Hidden, Outputs::First, Outputs::Last, Outputs::None, Outputs::All];
    let seqs = outputs.map(|_| cache.create());
    let three = tokens(0, 3);
    let batch: Vec<BatchItem> =
        seqs.iter().zip(outputs).map(|(&seq, outputs)| BatchItem { seq, tokens: &three, outputs }).collect();
    let planned = cache.plan(&batch).unwrap();
    assert_eq!(planned.step.outputs, [0, 1, 2, 3, 8, 12, 13, 14]);
    assert_eq!(planned.step.logits, [3, 4, 5, 6, 7]);
    let rows: Vec<(usize, usize)> = outputs.iter().map(|o| (o.rows(3), o.logit_rows(3))).collect();
    assert_eq!(rows, [(3, 0), (1, 1), (1, 1), (0, 0), (3, 3)]);
    cache.abort(planned.id).unwrap();
}
