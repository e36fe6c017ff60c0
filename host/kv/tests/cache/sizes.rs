//! What a cache may be made of.

use opencoti_compute::plan::StoreView;
use opencoti_kv::{Cache, CacheConfig, ConfigError};
use opencoti_plugin_api::kv_codec::Side;

use crate::support::{codec, config, group};

fn refusal(config: CacheConfig) -> ConfigError {
    Cache::new(config).err().expect("a refusal")
}

#[test]
fn tiles_are_aligned_and_lie_beside_each_other() {
    let mut odd = group("kv", 2, None);
    odd.geometry.k_head_dim = 3;
    odd.k = codec("f32", "{}", Side::K, 3);
    let cache = Cache::new(config(vec![odd])).unwrap();
    let view: StoreView = cache.views().remove(0);
    let (k, v) = (128 * 3 * 4, 128 * 4 * 4);
    assert_eq!(view.page_bytes, 2 * 2 * (k + v));
    assert_eq!(view.layers[1].k.offset, 2 * (k + v));
    assert_eq!(view.layers[1].v.offset, 2 * (k + v) + 2 * k);
    assert_eq!(view.base.as_ptr() as usize % 64, 0);
    assert_eq!(view.n_pages, 16);
}

#[test]
fn a_window_costs_live_windows_and_not_the_capacity() {
    let mut config = config(vec![group("kv", 1, None), group("swa", 1, Some(100))]);
    config.capacity_tokens = 1 << 16;
    config.step_tokens = 128;
    let stats = Cache::new(config).unwrap().stats();
    assert_eq!(stats[0].total, 512);
    // Four slots of a window and a step, four idle windows.
    assert_eq!(stats[1].total, 4 * 4 + 4 * 3);
}

#[test]
fn a_budget_of_windows_bounds_their_store_and_a_sequence_too_many_is_refused() {
    let groups = vec![group("kv", 1, None), group("swa", 1, Some(100))];
    let config = CacheConfig { window_sequences: Some(1), recent_sequences: 0, ..config(groups) };
    let mut cache = Cache::new(config).unwrap();
    // One sequence of (100 + 1 + 512) / 128 + 2 pages.
    assert_eq!(cache.stats()[1].total, 7);
    let a = cache.admit(None, 1000).unwrap();
    let refused = cache.admit(None, 1000).unwrap_err();
    assert!(refused.to_string().contains("`swa`"), "{refused}");
    cache.release(a).unwrap();
    cache.admit(None, 1000).unwrap();
}

#[test]
fn idle_sequences_get_no_more_pages_of_a_window_than_of_the_whole() {
    // Live: 4 sequences of (64 + 1 + 512) / 128 + 2 pages. Idle: 1000 sequences in the 16 pages of the capacity.
    let groups = vec![group("kv", 1, None), group("swa", 1, Some(64))];
    let sizes = CacheConfig { recent_sequences: 1000, ..config(groups) }.sizes().unwrap();
    assert_eq!((sizes[0].n_pages, sizes[1].n_pages), (16, 4 * 7 + 16));
}

#[test]
fn a_codec_with_a_stage_window_is_refused_by_name() {
    let mut staged = group("kv", 1, None);
    staged.v = codec("staged", "{}", Side::V, 4);
    let message = refusal(config(vec![staged])).to_string();
    assert!(message.starts_with("codec `staged` for V of cache group `kv` encodes 128 exact tokens"), "{message}");
}

#[test]
fn a_codec_of_another_side_or_size_is_refused() {
    let mut wrong = group("kv", 1, None);
    wrong.k = codec("f32", "{}", Side::K, 8);
    assert!(matches!(refusal(config(vec![wrong])), ConfigError::WrongCodec { found_dim: 8, head_dim: 4, .. }));
    let mut wrong = group("kv", 1, None);
    wrong.k = codec("f32", "{}", Side::V, 4);
    assert!(matches!(refusal(config(vec![wrong])), ConfigError::WrongCodec { side: Side::K, .. }));
}

#[test]
fn more_memory_than_there_is_is_a_refusal_with_both_figures() {
    let mut huge = config(vec![group("kv", 1, None)]);
    huge.capacity_tokens = 1 << 40;
    let message = refusal(huge).to_string();
    assert!(message.contains("70368744177664 bytes"), "{message}");
}

#[test]
fn sizes_that_overflow_are_a_refusal() {
    let mut huge = config(vec![group("kv", usize::MAX >> 9, None)]);
    huge.groups[0].geometry.n_kv_heads = usize::MAX >> 3;
    huge.groups[0].n_layers = 1;
    assert_eq!(refusal(huge), ConfigError::TooLarge { group: "kv".into() });
    let mut huge = config(vec![group("swa", 1, Some(usize::MAX))]);
    huge.capacity_tokens = usize::MAX;
    assert_eq!(refusal(huge), ConfigError::TooLarge { group: "swa".into() });
}

#[test]
fn a_size_of_zero_is_named() {
    let mut none = config(vec![group("kv", 1, None)]);
    none.step_tokens = 0;
    assert_eq!(refusal(none), ConfigError::Zero { field: "step_tokens" });
}
