//! State files of the cache. The digests are made right after each mutation, or nothing behind them would be reached.

use std::cell::RefCell;
use std::io::Cursor;
use std::sync::Arc;

use opencoti_compute::graph::{KvGeometry, StateGeometry};
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, ModelFingerprint, Outputs, StateConfig};
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;
use sha2::{Digest, Sha256};

use super::Target;

/// The target.
pub const TARGET: Target = Target { name: "state", seeds, run };

/// Magic, version and length of the header.
const PREFIX: usize = 20;
const DIGEST: usize = 32;

thread_local! {
    static CACHE: RefCell<Option<Cache>> = const { RefCell::new(None) };
}

fn model() -> ModelFingerprint {
    ModelFingerprint { name: "fuzzed".to_owned(), digest: [3; 32] }
}

/// A small cache with a full and a windowed group, and recurrent state.
fn cache() -> Option<Cache> {
    let plugin = CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink)).ok()?).ok()?;
    let group = |name: &str, window| {
        Some(GroupConfig {
            name: name.to_owned(),
            geometry: KvGeometry { n_kv_heads: 1, k_head_dim: 32, v_head_dim: 32, window },
            n_layers: 1,
            k: plugin.open("q4_0", "{}", Side::K, 32).ok()?,
            v: plugin.open("q8_0", "{}", Side::V, 32).ok()?,
            stage: None,
        })
    };
    Cache::new(CacheConfig {
        groups: vec![group("kv", None)?, group("swa", Some(64))?],
        capacity_tokens: 1024,
        slots: 2,
        window_sequences: None,
        recent_sequences: 1,
        step_tokens: 512,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 3,
        states: StateConfig { layers: vec![StateGeometry { conv: 2, recurrent: 3 }], rollback: 1, idle_planes: 4 },
    })
    .ok()
}

fn seeds() -> Vec<Vec<u8>> {
    [1u32, 130, 300].into_iter().filter_map(saved).collect()
}

/// The state of a sequence of `n` tokens, with snapshots in the middle and before the last one.
fn saved(n: u32) -> Option<Vec<u8>> {
    let mut cache = cache()?;
    let seq = cache.create();
    cache.keep_snapshots(seq, &[n as usize / 2, n as usize - 1]).ok()?;
    let tokens: Vec<u32> = (0..n).collect();
    let planned = cache.plan(&[BatchItem { seq, tokens: &tokens, outputs: Outputs::None }]).ok()?;
    cache.commit(planned.id).ok()?;
    let mut bytes = Vec::new();
    cache.save(seq, &mut bytes, &model()).ok()?;
    Some(bytes)
}

/// Puts right digests where the header's length says they belong.
fn seal(bytes: &mut [u8]) {
    let Some(length) = bytes.get(12..PREFIX).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes) else { return };
    let Some(end) = usize::try_from(length).ok().and_then(|n| n.checked_add(PREFIX)) else { return };
    let Some(pages) = end.checked_add(DIGEST).filter(|&p| p <= bytes.len()) else { return };
    let digest = Sha256::digest(&bytes[..end]);
    bytes[end..pages].copy_from_slice(&digest);
    if let Some(last) = bytes.len().checked_sub(DIGEST).filter(|&l| l >= pages) {
        let digest = Sha256::digest(&bytes[pages..last]);
        bytes[last..].copy_from_slice(&digest);
    }
}

fn run(input: &[u8]) -> String {
    let mut bytes = input.to_vec();
    seal(&mut bytes);
    CACHE.with_borrow_mut(|slot| {
        let cache = slot.get_or_insert_with(|| cache().expect("the fuzzer's own cache"));
        let outcome = match cache.restore(&mut Cursor::new(&bytes), &model()) {
            Err(e) => e.to_string(),
            Ok(seq) => {
                cache.erase(seq).expect("a restored sequence can be erased");
                "restored".to_owned()
            }
        };
        cache.check().expect("the cache is whole");
        outcome
    })
}
