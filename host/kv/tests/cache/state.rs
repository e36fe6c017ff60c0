//! State files: what is saved is restored and reused, and nothing else is.

use std::io::Cursor;

use opencoti_compute::plan::StoreView;
use opencoti_kv::{Cache, CacheConfig, GroupConfig, ModelFingerprint, Prefix, SeqId, StateError};
use opencoti_plugin_api::kv_codec::Side;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use crate::fold::{self, hybrid, states};
use crate::support::{codec, config, feed, full_cache, group, swa_cache, tokens};

fn model() -> ModelFingerprint {
    ModelFingerprint { name: "tiny".into(), digest: [7; 32] }
}

/// Writes a different value into every float of a sequence's pages.
fn paint(cache: &Cache, seq: SeqId) {
    let views = cache.views();
    for (group, view) in views.iter().enumerate() {
        for entry in cache.page_table(seq, group).unwrap() {
            let floats = view.page_bytes / 4;
            for i in 0..floats {
                let value = (entry.start_pos as usize * floats + i) as f32;
                // SAFETY: inside the page; nobody else uses the cache.
                unsafe {
                    let page = view.base.as_ptr().add(entry.page as usize * view.page_bytes);
                    page.cast::<f32>().add(i).write_unaligned(value);
                }
            }
        }
    }
}

/// Contents of a sequence's pages in order; slots that are not its own count as zero.
fn contents(cache: &Cache, seq: SeqId) -> Vec<Vec<u8>> {
    let mut pages = Vec::new();
    for (group, view) in cache.views().iter().enumerate() {
        for entry in cache.page_table(seq, group).unwrap() {
            let mut page = raw(view, entry.page);
            for side in view.layers.iter().flat_map(|l| [&l.k, &l.v]) {
                for head in 0..2 {
                    let tile = &mut page[side.offset + head * side.tile_bytes..][..side.tile_bytes];
                    tile[entry.len as usize * 4 * 4..].fill(0);
                }
            }
            pages.push(page);
        }
    }
    pages
}

/// A page's bytes.
fn raw(view: &StoreView, page: u32) -> Vec<u8> {
    // SAFETY: as above.
    unsafe {
        let page = view.base.as_ptr().add(page as usize * view.page_bytes);
        std::slice::from_raw_parts(page, view.page_bytes).to_vec()
    }
}

fn saved(cache: &Cache, seq: SeqId) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = cache.save(seq, &mut bytes, &model()).unwrap();
    assert_eq!(written, bytes.len() as u64);
    bytes
}

fn restore(cache: &mut Cache, bytes: &[u8]) -> Result<SeqId, StateError> {
    let before = cache.stats();
    let result = cache.restore(&mut Cursor::new(bytes), &model());
    cache.check().unwrap();
    if result.is_err() {
        assert_eq!(cache.stats(), before);
    }
    result
}

/// The state of a sequence of 300 tokens in a cache of one full group.
fn example() -> Vec<u8> {
    let mut cache = full_cache();
    let seq = cache.create();
    feed(&mut cache, seq, &tokens(0, 300));
    paint(&cache, seq);
    saved(&cache, seq)
}

fn refusal(cache: &mut Cache, bytes: &[u8]) -> String {
    restore(cache, bytes).unwrap_err().to_string()
}

#[test]
fn a_restored_prompt_is_reused() {
    let mut cache = full_cache();
    let bytes = example();
    let seq = restore(&mut cache, &bytes).unwrap();
    assert_eq!(cache.tokens(seq).unwrap(), tokens(0, 300));
    assert_eq!(cache.longest_prefix(&tokens(0, 280)), Some(Prefix { donor: seq, tokens: 280 }));
    assert_eq!(saved(&cache, seq), bytes);
    // It goes on in its last page.
    feed(&mut cache, seq, &[1]);
    assert_eq!(cache.page_table(seq, 0).unwrap().len(), 3);
}

#[test]
fn pages_come_back_byte_for_byte_with_live_windows() {
    let mut cache = swa_cache(100);
    let donor = cache.create();
    feed(&mut cache, donor, &tokens(0, 700));
    let seq = cache.fork(donor, 650).unwrap();
    feed(&mut cache, seq, &tokens(5000, 20));
    paint(&cache, seq);
    let bytes = saved(&cache, seq);
    let mut other = swa_cache(100);
    let unrelated = other.create();
    feed(&mut other, unrelated, &tokens(1, 1));
    let back = restore(&mut other, &bytes).unwrap();
    assert_eq!(contents(&other, back), contents(&cache, seq));
    assert_eq!(other.tokens(back).unwrap(), cache.tokens(seq).unwrap());
    for group in 0..2 {
        let spans = |cache: &Cache, seq| {
            let table = cache.page_table(seq, group).unwrap();
            table.iter().map(|e| (e.start_pos, e.len)).collect::<Vec<_>>()
        };
        assert_eq!(spans(&other, back), spans(&cache, seq));
    }
    assert!(other.page_table(back, 1).unwrap()[0].start_pos > 0);
}

#[test]
fn an_empty_sequence_may_be_saved() {
    let mut cache = swa_cache(100);
    let seq = cache.create();
    let bytes = saved(&cache, seq);
    let back = restore(&mut cache, &bytes).unwrap();
    assert!(cache.tokens(back).unwrap().is_empty());
}

#[test]
fn another_model_is_refused_by_name() {
    let bytes = example();
    let other = ModelFingerprint { name: "huge".into(), digest: [8; 32] };
    let message = full_cache().restore(&mut Cursor::new(&bytes), &other).unwrap_err().to_string();
    assert_eq!(
        message,
        "the state file was written with model `tiny` (070707070707…), this server has `huge` (080808080808…)"
    );
}

#[test]
fn another_geometry_codec_or_option_is_refused_by_name() {
    let bytes = example();
    type Change = fn(&mut GroupConfig);
    let cases: [(Change, &str); 5] = [
        (|g| g.n_layers = 3, "the number of layers of cache group 0: 2, this server has 3"),
        (|g| g.geometry.n_kv_heads = 1, "2 KV heads of 4 and 4 values, no window, this server has 1 KV heads"),
        (|g| g.geometry.window = Some(64), "this server has 2 KV heads of 4 and 4 values, a window of 64"),
        (
            |g| g.k = codec("other", "{}", Side::K, 4),
            "the K codec of cache group 0: `f32` with options {} of plugin `plain` 1.2.3, this server has `other`",
        ),
        (|g| g.v = codec("f32", r#"{"x":1}"#, Side::V, 4), r#"this server has `f32` with options {"x":1}"#),
    ];
    for (change, expected) in cases {
        let mut group = group("kv", 2, None);
        change(&mut group);
        let message = refusal(&mut Cache::new(config(vec![group])).unwrap(), &bytes);
        assert!(message.contains(expected), "{message}");
    }
    let message = refusal(&mut swa_cache(64), &bytes);
    assert!(message.contains("cache groups in number 1, this server has 2"), "{message}");
}

#[test]
fn a_file_of_another_kind_or_version_is_refused() {
    let mut cache = full_cache();
    assert!(matches!(restore(&mut cache, b""), Err(StateError::NotAState)));
    assert!(matches!(restore(&mut cache, &[b'x'; 500]), Err(StateError::NotAState)));
    let mut bytes = example();
    bytes[8] = 1;
    assert_eq!(
        refusal(&mut cache, &bytes),
        "the state file has format version 1, this server reads version 3; save the state again"
    );
}

#[test]
fn a_file_cut_short_or_with_more_behind_it_is_refused() {
    let mut cache = full_cache();
    let mut bytes = example();
    for n in [10, 40, 90, 300, bytes.len() - 1] {
        let message = refusal(&mut cache, &bytes[..n]);
        assert!(message.starts_with(&format!("the state file is {n} bytes long, expected ")), "{message}");
    }
    bytes.push(0);
    assert!(matches!(restore(&mut cache, &bytes), Err(StateError::Length { .. })));
}

#[test]
fn damage_is_found_wherever_it_is() {
    let mut cache = full_cache();
    let bytes = example();
    let pages = 3 * cache.stats()[0].page_bytes;
    let pages_at = bytes.len() - 32 - pages;
    for (at, part) in
        [(25, "header"), (pages_at - 40, "header"), (pages_at, "contents"), (bytes.len() - 40, "contents")]
    {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        let message = refusal(&mut cache, &bytes);
        assert!(message.starts_with(&format!("the {part} of the state file is damaged")), "{message}");
    }
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let bytes = example();
    let mut cache = full_cache();
    let busy = cache.create();
    feed(&mut cache, busy, &tokens(0, 1800));
    let message = refusal(&mut cache, &bytes);
    assert_eq!(message, "the cache `kv` has room for 128 more tokens, 384 are needed");
    cache.retain(busy).unwrap();
    restore(&mut cache, &bytes).unwrap();
    assert_eq!(cache.idle_sequences(), 0);
}

#[test]
fn nothing_is_saved_while_a_step_runs() {
    let mut cache = full_cache();
    let seq = cache.create();
    let step = crate::support::plan(&mut cache, &[(seq, &[1])]).unwrap();
    assert!(matches!(cache.save(seq, &mut Vec::new(), &model()), Err(StateError::Cache(_))));
    cache.commit(step.id).unwrap();
}

#[test]
fn a_file_holds_nothing_of_slots_that_are_not_its_own() {
    let mut cache = full_cache();
    let donor = cache.create();
    feed(&mut cache, donor, &tokens(0, 200));
    paint(&cache, donor);
    let fork = cache.fork(donor, 140).unwrap();
    let bytes = saved(&cache, fork);
    let mut other = full_cache();
    let back = restore(&mut other, &bytes).unwrap();
    let view = other.views().remove(0);
    let pages: Vec<_> = other.page_table(back, 0).unwrap().iter().map(|e| raw(&view, e.page)).collect();
    assert_eq!(pages, contents(&cache, fork));
}

/// A cache with recurrent state and a sequence of 320 tokens in it, of which 100 and 299 have snapshots.
fn hybrid_example() -> (Cache, SeqId) {
    let mut cache = Cache::new(hybrid(2, 4)).unwrap();
    let seq = cache.admit(None, 400).unwrap();
    cache.keep_snapshots(seq, &[100, 299]).unwrap();
    fold::step(&mut cache, &[(seq, &tokens(0, 300))]);
    fold::step(&mut cache, &[(seq, &tokens(5000, 20))]);
    (cache, seq)
}

#[test]
fn recurrent_state_and_its_snapshots_come_back() {
    let (cache, seq) = hybrid_example();
    paint(&cache, seq);
    let bytes = saved(&cache, seq);
    let mut other = Cache::new(hybrid(2, 4)).unwrap();
    let back = restore(&mut other, &bytes).unwrap();
    fold::check(&other, back);
    assert_eq!((other.planes(back).unwrap()[0].0, other.snapshots()), (320, 2));
    assert_eq!(contents(&other, back), contents(&cache, seq));
    other.retain(back).unwrap();
    // What was computed for the prompt is used for the prompt.
    for (n, found) in [(99, None), (200, Some(100)), (299, Some(299))] {
        let prefix = other.longest_prefix(&tokens(0, n));
        assert_eq!(prefix.map(|p| p.tokens), found);
        let Some(prefix) = prefix else { continue };
        let again = other.admit(Some(prefix), 10).unwrap();
        fold::step(&mut other, &[(again, &[1, 2])]);
        other.release(again).unwrap();
    }
    // Once more, the snapshots are there already.
    let twice = restore(&mut other, &bytes).unwrap();
    assert_eq!(other.snapshots(), 2);
    fold::step(&mut other, &[(twice, &[3])]);
    other.erase(twice).unwrap();
    assert_eq!(other.snapshots(), 2, "the first one still begins with them");
    let idle = other.longest_prefix(&[tokens(0, 300), tokens(5000, 20)].concat()).unwrap().donor;
    other.erase(idle).unwrap();
    let stats = other.state_stats().unwrap();
    assert_eq!((other.snapshots(), stats.free), (0, stats.total));
    assert!(other.stats().iter().all(|s| s.free == s.total));
}

#[test]
fn a_windowed_prompt_is_reused_after_a_restore() {
    let config = || CacheConfig { snapshots: 4, ..config(vec![group("kv", 1, None), group("swa", 2, Some(100))]) };
    let mut cache = Cache::new(config()).unwrap();
    let seq = cache.create();
    cache.keep_snapshots(seq, &[299]).unwrap();
    feed(&mut cache, seq, &tokens(0, 300));
    feed(&mut cache, seq, &tokens(5000, 400));
    paint(&cache, seq);
    let bytes = saved(&cache, seq);
    let donor = cache.longest_prefix(&tokens(0, 299)).unwrap().donor;
    let mut other = Cache::new(config()).unwrap();
    let back = restore(&mut other, &bytes).unwrap();
    let prefix = other.longest_prefix(&tokens(0, 299)).unwrap();
    assert_eq!(prefix.tokens, 299);
    assert_eq!(contents(&other, prefix.donor), contents(&cache, donor));
    feed(&mut other, back, &[1, 2, 3]);
    let fork = other.admit(Some(prefix), 10).unwrap();
    feed(&mut other, fork, &[1, 2, 3]);
    [back, fork].into_iter().for_each(|seq| other.release(seq).unwrap());
    while other.evict_lru().is_some() {}
    assert!(other.stats().iter().all(|s| s.free == s.total));
}

#[test]
fn without_room_for_its_snapshots_a_sequence_comes_back_alone() {
    let (cache, seq) = hybrid_example();
    let bytes = saved(&cache, seq);
    let small = CacheConfig { slots: 1, states: states(0, 0), ..hybrid(0, 4) };
    let mut other = Cache::new(small).unwrap();
    let back = restore(&mut other, &bytes).unwrap();
    fold::check(&other, back);
    assert_eq!(other.snapshots(), 0);
    fold::step(&mut other, &[(back, &[3])]);
    other.reserve(back, 10).unwrap();
    assert_eq!(refusal(&mut other, &bytes), "the cache `state` has room for 0 more states, 1 are needed");
}

#[test]
fn other_recurrent_layers_are_refused_by_name() {
    let (cache, seq) = hybrid_example();
    let bytes = saved(&cache, seq);
    let mut other = hybrid(2, 4);
    other.states.layers[1].conv = 2;
    let message = refusal(&mut Cache::new(other).unwrap(), &bytes);
    assert_eq!(
        message,
        "the state file was written with the state of recurrent layer 1 of 1 + 1 words, this server has 2 + 1 words"
    );
    let message = refusal(&mut full_cache(), &bytes);
    assert!(message.contains("the number of layers of cache group 0: 1, this server has 2"), "{message}");
    let message = refusal(&mut Cache::new(config(vec![group("kv", 1, None)])).unwrap(), &bytes);
    assert!(message.contains("recurrent layers in number 2, this server has 0"), "{message}");
}

/// A valid file with bytes of the header changed and the digest of the header put right.
fn forged(bytes: &[u8], changes: &[(prop::sample::Index, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let header_bytes = u64::from_le_bytes(bytes[12..20].try_into().unwrap()) as usize;
    for (index, value) in changes {
        bytes[20 + index.index(header_bytes)] = *value;
    }
    let digest = Sha256::digest(&bytes[..20 + header_bytes]);
    bytes[20 + header_bytes..][..32].copy_from_slice(&digest);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_changed_byte_is_refused(at: prop::sample::Index, flip in 1u8..) {
        let mut bytes = example();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        restore(&mut full_cache(), &bytes).unwrap_err();
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), marked: bool) {
        let mut file = if marked { b"ocotikv\n\x02\0\0\0".to_vec() } else { Vec::new() };
        file.extend(bytes);
        restore(&mut full_cache(), &file).unwrap_err();
    }

    #[test]
    fn a_forged_header_never_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut cache = swa_cache(100);
        let seq = cache.create();
        feed(&mut cache, seq, &[1, 2, 3]);
        let bytes = forged(&saved(&cache, seq), &changes);
        // Other tokens make another valid file; everything else is refused.
        if let Ok(back) = restore(&mut cache, &bytes) {
            assert_eq!(cache.tokens(back).unwrap().len(), 3);
            feed(&mut cache, back, &[4]);
        }
    }

    #[test]
    fn a_forged_header_with_state_never_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (mut cache, seq) = hybrid_example();
        let bytes = forged(&saved(&cache, seq), &changes);
        cache.release(seq).unwrap();
        while cache.evict_lru().is_some() {}
        if let Ok(back) = restore(&mut cache, &bytes) {
            feed(&mut cache, back, &[4]);
            cache.release(back).unwrap();
            while cache.evict_lru().is_some() {}
        }
        let stats = cache.state_stats().unwrap();
        prop_assert_eq!(stats.free, stats.total);
    }
}
