//! The token-wise codecs in pages: what a cache does to tiles keeps their rows.

use std::io::Cursor;
use std::sync::Arc;

use opencoti_compute::channels::{Channels, LayerChannels};
use opencoti_compute::graph::KvGeometry;
use opencoti_compute::plan::{Step, StoreView};
use opencoti_kv::{Cache, GroupConfig, ModelFingerprint, SeqId};
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

use crate::support::{config, plan, tokens};

const HEAD_DIM: usize = 64;

/// A cache for each token-wise codec.
fn caches() -> Vec<(String, Cache)> {
    let roots = [opencoti_kv_scalar::root(), opencoti_kv_turbo::root(), opencoti_kv_tcq::root()];
    let plugins = roots.map(|r| CodecPlugin::new(Instance::create(r, "{}", Arc::new(NoSink)).unwrap()).unwrap());
    let codecs = |p: &CodecPlugin| p.codecs().unwrap().into_iter().map(|c| c.name).collect::<Vec<_>>();
    let cache = |(plugin, name): (&CodecPlugin, String)| {
        let open = |side| plugin.open(&name, "{}", side, HEAD_DIM).unwrap();
        let geometry = KvGeometry { n_kv_heads: 2, k_head_dim: HEAD_DIM, v_head_dim: HEAD_DIM, window: None };
        let group =
            GroupConfig { name: "kv".into(), geometry, n_layers: 1, k: open(Side::K), v: open(Side::V), stage: None };
        (name.clone(), Cache::new(config(vec![group])).unwrap())
    };
    plugins.iter().flat_map(|p| codecs(p).into_iter().map(move |name| (p, name))).map(cache).collect()
}

/// A row of keys that depends on its token and position.
fn key(token: u32, position: u32) -> Vec<f32> {
    (0..HEAD_DIM).map(|i| ((token * 31 + position * 7) as f32 * 0.37 + i as f32 * 1.3).sin()).collect()
}

/// Writes the keys of a step as an executor would, for KV head 1.
fn write(step: &Step) {
    for run in &step.groups[0].appends {
        let view = &step.stores[run.store as usize];
        let rows: Vec<f32> =
            run.rows.clone().flat_map(|r| key(step.tokens[r as usize], step.positions[r as usize])).collect();
        let side = &view.layers[0].k;
        // SAFETY: the plan's own page; nobody else works on the cache.
        unsafe {
            let tile = view.tile(side, run.page, 1);
            side.codec.append(tile, run.first_slot as usize, run.rows.len(), rows.as_ptr(), HEAD_DIM).unwrap();
        }
    }
}

/// Appends tokens with their keys.
fn feed(cache: &mut Cache, seq: SeqId, tokens: &[u32]) {
    let planned = plan(cache, &[(seq, tokens)]).unwrap();
    write(&planned.step);
    cache.commit(planned.id).unwrap();
}

/// The decoded keys of a sequence.
fn keys(cache: &Cache, seq: SeqId) -> Vec<Vec<f32>> {
    let view: StoreView = cache.views().remove(0);
    let side = &view.layers[0].k;
    let mut keys = Vec::new();
    for entry in cache.page_table(seq, 0).unwrap() {
        let mut rows = vec![0f32; entry.len as usize * HEAD_DIM];
        // SAFETY: as above.
        unsafe {
            let tile = view.tile(side, entry.page, 1);
            side.codec.decode_page(tile, 0, entry.len as usize, rows.as_mut_ptr(), HEAD_DIM).unwrap();
        }
        keys.extend(rows.chunks(HEAD_DIM).map(<[f32]>::to_vec));
    }
    keys
}

/// The keys of the same tokens, written at once into a cache of their own.
fn fresh_keys(codec: &str, tokens: &[u32]) -> Vec<Vec<f32>> {
    let (_, mut cache) = caches().into_iter().find(|(name, _)| name == codec).unwrap();
    let seq = cache.create();
    feed(&mut cache, seq, tokens);
    keys(&cache, seq)
}

#[test]
fn keys_written_after_a_truncation_replace_the_old_ones_and_no_others() {
    for (codec, mut cache) in caches() {
        let seq = cache.create();
        feed(&mut cache, seq, &tokens(0, 200));
        cache.truncate(seq, 163).unwrap();
        feed(&mut cache, seq, &tokens(5000, 3));
        feed(&mut cache, seq, &tokens(6000, 30));
        let expected = fresh_keys(&codec, cache.tokens(seq).unwrap());
        assert_eq!(keys(&cache, seq), expected, "{codec}");
    }
}

#[test]
fn a_fork_and_its_donor_keep_their_keys_while_both_go_on() {
    for (codec, mut cache) in caches() {
        let a = cache.create();
        feed(&mut cache, a, &tokens(0, 150));
        let b = cache.fork(a, 140).unwrap();
        feed(&mut cache, b, &tokens(7000, 60));
        feed(&mut cache, a, &tokens(8000, 60));
        for seq in [a, b] {
            assert_eq!(keys(&cache, seq), fresh_keys(&codec, cache.tokens(seq).unwrap()), "{codec}");
        }
    }
}

#[test]
fn a_restored_sequence_decodes_to_the_same_keys_and_goes_on() {
    let model = ModelFingerprint { name: "m".into(), digest: [0; 32] };
    for ((codec, mut cache), (_, mut other)) in caches().into_iter().zip(caches()) {
        let seq = cache.create();
        feed(&mut cache, seq, &tokens(0, 150));
        let mut file = Vec::new();
        cache.save(seq, &mut file, &model).unwrap();
        let back = other.restore(&mut Cursor::new(&file), &model).unwrap();
        feed(&mut other, back, &tokens(9000, 20));
        assert_eq!(keys(&other, back), fresh_keys(&codec, other.tokens(back).unwrap()), "{codec}");
    }
}

#[test]
fn a_state_with_prepared_channels_is_refused_by_a_cache_without() {
    let model = ModelFingerprint { name: "m".into(), digest: [0; 32] };
    let factors = vec![2.0; 2 * HEAD_DIM];
    let channels = Channels::new(2, HEAD_DIM, None, Some(factors)).unwrap();
    let layer = LayerChannels { k: Some(Arc::new(channels)), v: None };
    let (_, mut from) = caches().remove(0);
    from.use_channels(0, "table 12ab", vec![layer.clone()]).unwrap();
    let seq = from.create();
    feed(&mut from, seq, &[1, 2, 3]);
    let mut file = Vec::new();
    from.save(seq, &mut file, &model).unwrap();
    let (_, mut plain) = caches().remove(0);
    let message = plain.restore(&mut Cursor::new(&file), &model).unwrap_err().to_string();
    assert!(message.contains("channels of table 12ab"), "{message}");
    assert!(plain.use_channels(0, "t", vec![]).is_err(), "no layers");
    assert!(plain.use_channels(0, "t", vec![LayerChannels { k: layer.k, v: None }; 2]).is_err(), "too many layers");
}

#[test]
fn a_state_of_one_codec_is_refused_by_a_cache_of_another() {
    let model = ModelFingerprint { name: "m".into(), digest: [0; 32] };
    let mut caches = caches();
    let (_, from) = &mut caches[0];
    let seq = from.create();
    feed(from, seq, &[1, 2, 3]);
    let mut file = Vec::new();
    from.save(seq, &mut file, &model).unwrap();
    for (codec, cache) in &mut caches[1..] {
        let message = cache.restore(&mut Cursor::new(&file), &model).unwrap_err().to_string();
        assert!(message.contains(&format!("this server has `{codec}`")), "{message}");
    }
}
