//! Exact tokens beside encoded pages: which queries meet which keys exactly, sealing, sharing and room.

use std::collections::BTreeSet;
use std::io::Cursor;

use opencoti_compute::plan::Step;
use opencoti_kv::{Cache, CacheConfig, ConfigError, ModelFingerprint, SeqId};

use crate::support::{config, feed, group, plan, staged_group, text, tokens};

/// A cache of one full group with a stage.
fn staged_cache(tokens: usize, sink: usize) -> Cache {
    Cache::new(config(vec![staged_group("kv", None, tokens, sink)])).unwrap()
}

/// Positions that a row reads from the stage, and from records.
fn read_by(step: &Step, row: u32) -> [BTreeSet<u32>; 2] {
    let mut found = [BTreeSet::new(), BTreeSet::new()];
    for segment in step.groups[0].segments.iter().filter(|s| s.queries.iter().any(|q| q.contains(&row))) {
        let visible = segment.mask.visible(step.positions[row as usize]);
        for span in segment.pages.head(0) {
            let positions = (span.start_pos..span.start_pos + span.len).filter(|p| visible.contains(p));
            found[usize::from(segment.store == 0)].extend(positions);
        }
    }
    found
}

/// Appends tokens in steps of `chunk`, checks what each row reads, and says in which order pages were sealed.
fn feed_checked(
    cache: &mut Cache,
    seq: SeqId,
    tokens: &[u32],
    chunk: usize,
    exact: impl Fn(u32, u32) -> bool,
) -> Vec<u32> {
    let mut sealed = Vec::new();
    for chunk in tokens.chunks(chunk) {
        let planned = plan(cache, &[(seq, chunk)]).unwrap();
        let step = &planned.step;
        sealed.extend(step.groups[0].seals.iter().map(|s| s.page));
        for (row, &position) in step.positions.iter().enumerate() {
            let [from_stage, from_records] = read_by(step, row as u32);
            let expected: BTreeSet<u32> = (0..=position).filter(|&key| exact(position, key)).collect();
            assert_eq!(from_stage, expected, "position {position} in steps of {}", chunk.len());
            assert_eq!(from_stage.len() + from_records.len(), position as usize + 1);
        }
        cache.commit(planned.id).unwrap();
        cache.check().unwrap();
    }
    sealed
}

#[test]
fn what_is_exact_depends_on_the_position_alone_however_a_prompt_is_cut() {
    for (tail, sink) in [(0, 0), (1, 0), (256, 0), (300, 100)] {
        let groups = |tokens: usize| tokens.div_ceil(128) as u32;
        let exact = |query: u32, key: u32| key / 128 + groups(tail) >= query / 128 || key < 128 * groups(sink);
        let mut orders = Vec::new();
        for chunk in [1, 7, 64, 128, 130, 450, 512] {
            let mut cache = staged_cache(tail, sink);
            let seq = cache.create();
            orders.push(feed_checked(&mut cache, seq, &tokens(0, 1100), chunk, exact));
        }
        assert!(orders.windows(2).all(|w| w[0] == w[1]), "pages are sealed in another order: {orders:?}");
        assert_eq!(orders[0].len(), 1099 / 128 - groups(tail) as usize - groups(sink) as usize);
    }
}

#[test]
fn records_are_written_ahead_between_steps_and_then_no_row_waits_for_them() {
    let mut cache = staged_cache(256, 0);
    let seq = cache.create();
    let mut ahead = 0;
    for i in 0..1100 {
        if let Some(planned) = cache.plan_seals() {
            ahead += planned.step.groups[0].seals.len();
            assert!(planned.step.tokens.is_empty());
            cache.commit(planned.id).unwrap();
        }
        let planned = plan(&mut cache, &[(seq, &[i])]).unwrap();
        assert!(planned.step.groups[0].seals.is_empty(), "{}", text(&planned));
        cache.commit(planned.id).unwrap();
        cache.check().unwrap();
    }
    // Seven by the end, and the one that position 1152 will need.
    assert_eq!(ahead, 1100 / 128 - 2 + 1);
}

#[test]
fn a_step_that_failed_has_sealed_nothing() {
    let mut cache = staged_cache(0, 0);
    let seq = cache.create();
    feed(&mut cache, seq, &tokens(0, 100));
    for _ in 0..2 {
        let planned = plan(&mut cache, &[(seq, &tokens(100, 200))]).unwrap();
        assert_eq!(planned.step.groups[0].seals.len(), 2);
        cache.abort(planned.id).unwrap();
        cache.check().unwrap();
    }
    let planned = cache.plan_seals();
    assert!(planned.is_none(), "the page is not full");
}

#[test]
fn a_page_is_sealed_once_for_all_who_share_it() {
    let mut cache = staged_cache(0, 0);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 256));
    let forks: Vec<SeqId> = (0..3).map(|_| cache.fork(a, 256).unwrap()).collect();
    let batch: Vec<(SeqId, &[u32])> = forks.iter().map(|&seq| (seq, &[1u32, 2, 3][..])).collect();
    let planned = plan(&mut cache, &batch).unwrap();
    assert_eq!(planned.step.groups[0].seals.len(), 1, "page 0 was sealed before: {}", text(&planned));
    cache.commit(planned.id).unwrap();
    let planned = plan(&mut cache, &[(a, &[9])]).unwrap();
    assert!(planned.step.groups[0].seals.is_empty());
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
}

#[test]
fn a_fork_inside_a_sealed_page_reads_its_record_and_goes_on_in_a_page_of_its_own() {
    let mut cache = staged_cache(0, 0);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 600));
    let b = cache.fork(a, 200).unwrap();
    let planned = plan(&mut cache, &[(b, &[7, 8])]).unwrap();
    let plan = &planned.step.groups[0];
    assert!(plan.seals.is_empty(), "a sealed page is sealed once: {plan}");
    let [from_stage, from_records] = read_by(&planned.step, 1);
    assert_eq!(from_records, (0..200).collect());
    assert_eq!(from_stage, [200, 201].into());
    let pages: Vec<u32> = cache.page_table(a, 0).unwrap().iter().map(|e| e.page).collect();
    assert!(plan.appends.iter().all(|run| run.store == 1), "appends go to the stage");
    cache.commit(planned.id).unwrap();
    assert_eq!(cache.page_table(a, 0).unwrap().iter().map(|e| e.page).collect::<Vec<_>>(), pages);
    assert!(!pages.contains(&cache.page_table(b, 0).unwrap()[2].page));
    cache.check().unwrap();
}

#[test]
fn a_fork_inside_a_page_of_the_stage_shares_it_while_its_writer_goes_on() {
    let mut cache = staged_cache(0, 0);
    let a = cache.create();
    feed(&mut cache, a, &tokens(0, 200));
    let b = cache.fork(a, 180).unwrap();
    feed(&mut cache, b, &tokens(900, 300));
    // The writer may still fill the page, so that those who have gone on read it exactly.
    let planned = plan(&mut cache, &[(b, &[1])]).unwrap();
    assert!(read_by(&planned.step, 0)[0].contains(&150));
    cache.commit(planned.id).unwrap();
    cache.retain(a).unwrap();
    // Nobody fills it any more: it is sealed with what there is.
    let planned = plan(&mut cache, &[(b, &[1])]).unwrap();
    assert_eq!(planned.step.groups[0].seals.iter().map(|s| s.filled).collect::<Vec<_>>(), [72]);
    assert!(read_by(&planned.step, 0)[1].contains(&150));
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
    let a = cache.admit(cache.longest_prefix(&tokens(0, 200)), 300).unwrap();
    feed(&mut cache, a, &tokens(200, 300));
}

#[test]
fn what_is_taken_back_is_written_to_the_same_page_again_but_never_into_a_record() {
    let mut cache =
        Cache::new(CacheConfig { rollback_tokens: 40, ..config(vec![staged_group("kv", None, 0, 0)]) }).unwrap();
    let a = cache.create();
    for n in 1..=300 {
        feed(&mut cache, a, &[n]);
        if let Some(planned) = cache.plan_seals() {
            cache.commit(planned.id).unwrap();
        }
        let n = n as usize;
        if n > 40 && n.is_multiple_of(13) {
            let last = *cache.page_table(a, 0).unwrap().last().unwrap();
            cache.truncate(a, n - 40).unwrap();
            feed(&mut cache, a, &tokens(5000, 40));
            let again = *cache.page_table(a, 0).unwrap().last().unwrap();
            assert_eq!((last.page, last.start_pos, last.len), (again.page, again.start_pos, again.len), "at {n}");
        }
    }
    feed(&mut cache, a, &tokens(0, 300));
    // Far back: the page at 200 has a record, which stays as it is.
    cache.truncate(a, 200).unwrap();
    let planned = plan(&mut cache, &[(a, &tokens(0, 10))]).unwrap();
    assert!(planned.step.groups[0].appends.iter().all(|run| run.first_slot == 0), "{}", text(&planned));
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
}

#[test]
fn idle_sequences_are_sealed_when_running_ones_need_their_room_and_stay() {
    let config = CacheConfig {
        slots: 1,
        window_sequences: None,
        recent_sequences: 16,
        capacity_tokens: 8192,
        ..config(vec![staged_group("kv", None, 128, 0)])
    };
    let mut cache = Cache::new(config).unwrap();
    for i in 0..10 {
        let seq = cache.admit(None, 300).unwrap();
        feed(&mut cache, seq, &tokens(1000 * i, 300));
        cache.retain(seq).unwrap();
        while let Some(planned) = cache.plan_seals() {
            cache.commit(planned.id).unwrap();
            cache.check().unwrap();
        }
        let stage = cache.stats()[0].stage.unwrap();
        assert!(stage.free > 0, "{stage:?}");
    }
    assert_eq!(cache.idle_sequences(), 10);
    let back = cache.longest_prefix(&tokens(0, 400)).expect("the oldest is there");
    assert_eq!(back.tokens, 300);
    let seq = cache.admit(Some(back), 100).unwrap();
    feed(&mut cache, seq, &tokens(0, 100));
}

#[test]
fn sizes_count_what_is_exact_to_the_byte() {
    // Two KV heads of four floats: 128 slots of 16 bytes, keys and values.
    let page = 2 * 2 * 128 * 16u64;
    let config = CacheConfig { capacity_tokens: 1 << 14, ..config(vec![staged_group("kv", None, 300, 128)]) };
    let sizes = config.sizes().unwrap()[0];
    // For each of four slots 300 tokens in 3 pages, the sink, the page that is filled, and two for cuts and one for
    // what may be taken back; for a step of 512 tokens four pages.
    assert_eq!((sizes.n_pages, sizes.n_stage_pages), (128, 4 * (3 + 1 + 1 + 2 + 1) + 4));
    assert_eq!(sizes.stage_bytes(), 36 * page);
    assert_eq!(config.bytes().unwrap(), (128 + 36) * page);
    let cache = Cache::new(config).unwrap();
    assert_eq!(cache.stats()[0].bytes(), (128 + 36) * page);
}

#[test]
fn a_codec_that_encodes_pages_as_a_whole_needs_a_stage() {
    let without = opencoti_kv::GroupConfig { stage: None, ..staged_group("kv", None, 0, 0) };
    let error = Cache::new(config(vec![without])).err().expect("a refusal");
    assert!(matches!(error, ConfigError::Staged { .. }), "{error}");
    let whole = CacheConfig { whole_texts: true, ..config(vec![staged_group("kv", None, 0, 0)]) };
    assert!(matches!(Cache::new(whole).err(), Some(ConfigError::StageOfWholeTexts { .. })));
}

#[test]
fn a_state_file_carries_records_and_exact_tokens_and_asks_for_the_same_stage() {
    let model = ModelFingerprint { name: "m".into(), digest: [0; 32] };
    let mut cache = staged_cache(128, 0);
    let seq = cache.create();
    feed(&mut cache, seq, &tokens(0, 700));
    let mut file = Vec::new();
    cache.save(seq, &mut file, &model).unwrap();
    let mut other = staged_cache(128, 0);
    let back = other.restore(&mut Cursor::new(&file), &model).unwrap();
    other.check().unwrap();
    let mut again = Vec::new();
    other.save(back, &mut again, &model).unwrap();
    assert!(file == again, "the same bytes come back");
    // Both go on alike.
    let plans = [(&mut cache, seq), (&mut other, back)].map(|(cache, seq)| {
        let planned = plan(cache, &[(seq, &tokens(0, 150))]).unwrap();
        let reads: Vec<_> = (0..150).map(|row| read_by(&planned.step, row)).collect();
        cache.commit(planned.id).unwrap();
        cache.check().unwrap();
        reads
    });
    assert_eq!(plans[0], plans[1]);
    let mut without = Cache::new(config(vec![group("kv", 1, None)])).unwrap();
    let message = without.restore(&mut Cursor::new(&file), &model).unwrap_err().to_string();
    assert!(message.contains("the K codec of cache group 0:"), "{message}");
}
