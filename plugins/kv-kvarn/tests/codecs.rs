//! What the codecs promise: golden codes, published errors, tiles of any magnitude, and no panic on any bytes.

use std::sync::Arc;

use opencoti_kv_kvarn::{KvarnCodec, Level};
use opencoti_plugin_api::cpu_tiles::CpuTiles;
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{KvCodec, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{PAGE_TOKENS, Status};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];

fn open_at(bits: usize, side: Side, head_dim: usize, options: serde_json::Value, level: Level) -> KvarnCodec {
    KvarnCodec::open(&OpenParams { codec: format!("kvarn{bits}"), options, side, head_dim }, level).unwrap()
}

fn open(bits: usize, side: Side, head_dim: usize) -> KvarnCodec {
    open_at(bits, side, head_dim, json!({}), Level::detect())
}

fn gaussian(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

fn page(rng: &mut ChaCha8Rng, d: usize) -> Vec<f32> {
    (0..PAGE_TOKENS * d).map(|_| gaussian(rng)).collect()
}

fn encoded(codec: &KvarnCodec, rows: &[f32]) -> Vec<u8> {
    let facts = codec.facts();
    let mut tile = vec![0xa5; facts.tile_bytes];
    codec.encode_page(&mut tile, Rows::new(rows, PAGE_TOKENS, facts.head_dim, facts.head_dim)).unwrap();
    tile
}

fn decoded(codec: &KvarnCodec, tile: &[u8], first: usize, n: usize) -> Vec<f32> {
    let d = codec.facts().head_dim;
    let mut out = vec![0.0; n * d];
    codec.decode_page(tile, first, RowsMut::new(&mut out, n, d, d)).unwrap();
    out
}

/// Rows as they come back, in the plain basis.
fn back(codec: &KvarnCodec, rows: &[f32]) -> Vec<f32> {
    let d = codec.facts().head_dim;
    let mut out = decoded(codec, &encoded(codec, rows), 0, PAGE_TOKENS);
    codec.transform_output(RowsMut::new(&mut out, PAGE_TOKENS, d, d)).unwrap();
    out
}

fn relative_mse(x: &[f32], y: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (&x, &y) in x.iter().zip(y) {
        error += f64::from(x - y).powi(2);
        norm += f64::from(x).powi(2);
    }
    error / norm
}

/// Keys with eight strong channels and tokens of different gains, in the plain basis.
fn golden_rows() -> Vec<f32> {
    let value = |t: usize, c: usize| {
        let n = (131 * t + 37 * c + 5 * ((t * c) % 17)) % 257;
        let gain = if c % 8 == 3 { 8.0 } else { 1.0 } * if t % 5 == 2 { 1.5 } else { 1.0 };
        (n as f32 - 128.0) / 32.0 * gain
    };
    (0..PAGE_TOKENS).flat_map(|t| (0..128).map(move |c| value(t, c))).collect()
}

#[test]
fn codes_and_axes_match_the_golden_vectors() {
    let golden: [(usize, [f32; 4], f64, &str); 3] = [
        (
            2,
            [1.0459, 1.7119, 1.1123, 0.97412],
            0.169411,
            "a59975666198465566599958556966ad5918a655855956265655865967168659",
        ),
        (
            3,
            [0.44849, 0.73389, 0.47656, 0.41748],
            0.0302305,
            "4b198adb55714b15ce14b6291c176ae1086a9b363214b7b3e2962e5c296d53282e8dc211d4366d5c286e1fc52d55b84e",
        ),
        (
            4,
            [0.20923, 0.34229, 0.22241, 0.19482],
            0.00655779,
            "378a8384764f5a79275b92c6487176356978836393879164777496384858f7a89576b225698c4467478285373b35690838764666798284767e5a69275b82b637",
        ),
    ];
    let rows = golden_rows();
    for (bits, scales, error, codes) in golden {
        let options = json!({"floor": "reference", "clip": "none"});
        let codec = open_at(bits, Side::K, 128, options, Level::detect());
        let tile = encoded(&codec, &rows);
        let hex: String = codec.row(&tile, 0, 0).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, codes, "{bits} bits");
        let [scale, zero, other] = codec.axes(&tile, 0);
        let close =
            |found: &[f32], expected: [f32; 4]| found.iter().zip(expected).all(|(f, e)| (f / e - 1.0).abs() < 1e-3);
        assert!(close(&scale, scales), "{bits} bits: {:?}", &scale[..4]);
        assert!(close(&zero, [-1.3223, -2.9785, -2.0020, -1.3652]), "{bits} bits: {:?}", &zero[..4]);
        assert!(close(&other, [5.8906, 6.5234, 9.9844, 5.3281]), "{bits} bits: {:?}", &other[..4]);
        let found = relative_mse(&rows, &back(&codec, &rows));
        assert!((found / error - 1.0).abs() < 1e-3, "{bits} bits: {found} instead of {error}");
    }
}

#[test]
fn gaussian_errors_are_the_published_ones_and_the_search_lowers_them() {
    let plain = [0.2465, 0.04496, 0.009781, 0.002289, 5.545e-4, 3.453e-5];
    let searched = [0.1135, 0.03291, 0.00871, 0.00219];
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let pages: Vec<Vec<f32>> = (0..40).map(|_| page(&mut rng, 128)).collect();
    let mean = |codec: &KvarnCodec| pages.iter().map(|p| relative_mse(p, &back(codec, p))).sum::<f64>() / 40.0;
    for (i, bits) in BITS.into_iter().enumerate() {
        for side in [Side::K, Side::V] {
            let found = mean(&open_at(bits, side, 128, json!({"clip": "none"}), Level::detect()));
            let tolerance = if bits == 2 { 0.04 } else { 0.02 };
            assert!((found / plain[i] - 1.0).abs() < tolerance, "kvarn{bits} {side}: {found} instead of {}", plain[i]);
            let with_search = mean(&open(bits, side, 128));
            assert!(with_search <= found, "kvarn{bits} {side}: {with_search} after a search, {found} without");
            if let Some(expected) = searched.get(i) {
                assert!((with_search / expected - 1.0).abs() < tolerance, "kvarn{bits} {side}: {with_search}");
            }
        }
    }
}

/// Channels and tokens of different gains, some tokens of small norm.
fn structured(rng: &mut ChaCha8Rng, d: usize) -> Vec<f32> {
    let channels: Vec<f32> = (0..d).map(|_| (0.8 * gaussian(rng)).exp()).collect();
    (0..PAGE_TOKENS)
        .flat_map(|_| {
            let token = (0.5 * gaussian(rng)).exp() * if rng.random::<f32>() < 0.03 { 0.1 } else { 1.0 };
            let row: Vec<f32> = channels.iter().map(|c| gaussian(rng) * c * token).collect();
            row
        })
        .collect()
}

#[test]
fn a_tile_of_any_magnitude_has_the_same_error() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for side in [Side::K, Side::V] {
        let rows = structured(&mut rng, 128);
        let error = |options: serde_json::Value, exponent: i32| {
            let scaled: Vec<f32> = rows.iter().map(|x| x * 2f32.powi(exponent)).collect();
            relative_mse(&scaled, &back(&open_at(4, side, 128, options, Level::detect()), &scaled))
        };
        let at_one = error(json!({}), 0);
        for exponent in [-12, -6, -3, 4, 8] {
            let found = error(json!({}), exponent);
            assert!((found / at_one - 1.0).abs() < 0.01, "{side} at 2^{exponent}: {found}, {at_one} at 1");
        }
        let reference = || json!({"floor": "reference", "clip": "none"});
        let (small, large) = (error(reference(), -6), error(reference(), 2));
        // Rotated channels vary alike; it is tokens that need raising, and those are the columns of keys.
        assert!(
            side == Side::V || small > 1.1 * large,
            "{side}: the reference floor gives {small} to small tiles, {large} to large ones"
        );
    }
}

#[test]
fn a_tile_of_rank_one_is_nearly_exact() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for side in [Side::K, Side::V] {
        for d in [64, 128, 256] {
            let (u, v): (Vec<f32>, Vec<f32>) =
                ((0..PAGE_TOKENS).map(|_| gaussian(&mut rng)).collect(), (0..d).map(|_| gaussian(&mut rng)).collect());
            let rows: Vec<f32> = u.iter().flat_map(|u| v.iter().map(move |v| u * v)).collect();
            let error = relative_mse(&rows, &back(&open(4, side, d), &rows));
            assert!(error < 1e-6, "{side} of {d}: {error}");
        }
    }
}

#[test]
fn zeros_constants_and_single_odd_values_stay_where_they_are() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for bits in BITS {
        for side in [Side::K, Side::V] {
            let codec = open(bits, side, 64);
            assert!(back(&codec, &vec![0.0; PAGE_TOKENS * 64]).iter().all(|&x| x == 0.0));
            for constant in [1.0f32, -3e-3, 700.0] {
                let rows = vec![constant; PAGE_TOKENS * 64];
                let error = relative_mse(&rows, &back(&codec, &rows));
                // Half floats round each of the 64 rotated channels by up to 2^-11 of the largest.
                assert!(error < 64.0 * 2f64.powi(-22), "kvarn{bits} {side} of {constant}: {error}");
            }
            let rows = page(&mut rng, 64);
            for odd in [f32::NAN, f32::INFINITY] {
                let mut with_odd = rows.clone();
                with_odd[5 * 64 + 3] = odd;
                let found = back(&codec, &with_odd);
                let others = |x: &[f32]| [&x[..5 * 64], &x[6 * 64..]].concat();
                let error = relative_mse(&others(&rows), &others(&found));
                assert!(error < 0.25, "kvarn{bits} {side}: {odd} leaves an error of {error} in other tokens");
                assert!(found.iter().all(|x| x.is_finite()));
            }
        }
    }
}

#[test]
fn permuted_tokens_permute_factors_and_codes_of_keys() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let rows = structured(&mut rng, 128);
    let order = |t: usize| (t * 37 + 11) % PAGE_TOKENS;
    let permuted: Vec<f32> = (0..PAGE_TOKENS).flat_map(|t| rows[order(t) * 128..][..128].to_vec()).collect();
    let codec = open_at(4, Side::K, 128, json!({"clip": "none"}), Level::detect());
    let (a, b) = (encoded(&codec, &rows), encoded(&codec, &permuted));
    let ([.., other_a], [.., other_b]) = (codec.axes(&a, 0), codec.axes(&b, 0));
    let code = |row: &[u8], t: usize| row[t / 2] >> (4 * (t % 2)) & 15;
    for t in 0..PAGE_TOKENS {
        assert!((other_b[t] / other_a[order(t)] - 1.0).abs() < 2e-3);
    }
    let mut moved = 0;
    for r in 0..128 {
        let (row_a, row_b) = (codec.row(&a, 0, r), codec.row(&b, 0, r));
        // Sums in another order may put a value beside a boundary on its other side.
        moved += (0..PAGE_TOKENS).filter(|&t| code(&row_b, t) != code(&row_a, order(t))).count();
    }
    assert!(moved < 40, "{moved} codes differ");
}

#[test]
fn a_tile_has_the_size_of_its_records() {
    for bits in BITS {
        for (d, slices) in [(128, 1), (256, 2), (512, 4)] {
            for side in [Side::K, Side::V] {
                let facts = open(bits, side, d).facts();
                assert_eq!(facts.tile_bytes, slices * (2048 * bits + 768));
                assert_eq!(facts.bits_per_value, bits as f32 + 0.375);
                assert_eq!(facts.stage_tokens, 128);
            }
        }
        assert_eq!(open(bits, Side::K, 64).facts().tile_bytes, 1024 * bits + 512);
        assert_eq!(open(bits, Side::V, 64).facts().tile_bytes, 1024 * bits + 640);
    }
}

#[test]
fn every_instruction_set_writes_the_same_bytes_and_reads_the_same_values() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for bits in BITS {
        for side in [Side::K, Side::V] {
            for d in [64, 96, 256] {
                let rows = structured(&mut rng, d);
                let portable = open_at(bits, side, d, json!({}), Level::Portable);
                let tile = encoded(&portable, &rows);
                for level in Level::available() {
                    let codec = open_at(bits, side, d, json!({}), level);
                    assert!(encoded(&codec, &rows) == tile, "kvarn{bits} {side} of {d} on {level:?}");
                    assert!(decoded(&codec, &tile, 3, 100) == decoded(&portable, &tile, 3, 100));
                }
            }
        }
    }
}

/// Space aligned as the ABI promises.
fn aligned(bytes: usize) -> Vec<[u64; 8]> {
    vec![[0; 8]; bytes.div_ceil(64)]
}

fn bytes_of(space: &mut [[u64; 8]], n: usize) -> &mut [u8] {
    // SAFETY: every byte of the space is initialised.
    let bytes = unsafe { space.align_to_mut::<u8>().1 };
    &mut bytes[..n]
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The kernels against products with decoded rows in f64, relative to the sum of magnitudes of what they add up.
fn check_kernels(keys: &KvarnCodec, values: &KvarnCodec, rng: &mut ChaCha8Rng, n_rows: usize, first: usize, n: usize) {
    let d = keys.facts().head_dim;
    let mut x = structured(rng, d);
    // An outlier in the last element of every row shows a kernel that stops early.
    x.chunks_mut(d).for_each(|row| row[d - 1] = 30.0);
    let tile = encoded(keys, &x);
    let stored = decoded(keys, &tile, first, n);
    let q: Vec<f32> = (0..n_rows * d).map(|_| gaussian(rng)).collect();
    let mut space = aligned(n_rows * keys.query_bytes());
    let prepared = bytes_of(&mut space, n_rows * keys.query_bytes());
    keys.prepare_query(Rows::new(&q, n_rows, d, d), prepared).unwrap();
    let mut turned = q;
    keys.transform_query(RowsMut::new(&mut turned, n_rows, d, d)).unwrap();
    let stride = n + 3;
    let mut scores = vec![f32::NAN; n_rows * stride];
    keys.score(prepared, &tile, first, RowsMut::new(&mut scores, n_rows, n, stride)).unwrap();
    for r in 0..n_rows {
        let q = &turned[r * d..][..d];
        for t in 0..n {
            let k = &stored[t * d..][..d];
            let magnitude = (dot(q, q) * dot(k, k)).sqrt();
            assert!((f64::from(scores[r * stride + t]) - dot(q, k)).abs() <= 1e-5 * magnitude);
        }
        assert!(scores[r * stride + n..][..3].iter().all(|s| s.is_nan()), "written beyond the asked slots");
    }

    let tile = encoded(values, &x);
    let stored = decoded(values, &tile, first, n);
    let weights: Vec<f32> = (0..n_rows * stride).map(|_| rng.random()).collect();
    let start: Vec<f32> = (0..n_rows * d).map(|_| gaussian(rng)).collect();
    let mut acc = start.clone();
    let w = Rows::new(&weights, n_rows, n, stride);
    values.accumulate(w, &tile, first, RowsMut::new(&mut acc, n_rows, d, d)).unwrap();
    let norm = stored.iter().fold(0f32, |most, x| most.max(x.abs()));
    for r in 0..n_rows {
        for i in 0..d {
            let terms = (0..n).map(|t| f64::from(weights[r * stride + t]) * f64::from(stored[t * d + i]));
            let expected = f64::from(start[r * d + i]) + terms.sum::<f64>();
            let bound = 1e-5 * f64::from(norm) * (n as f64).sqrt() + 1e-5;
            assert!((f64::from(acc[r * d + i]) - expected).abs() <= bound, "{} for {expected}", acc[r * d + i]);
        }
    }
}

#[test]
fn kernels_agree_with_products_of_decoded_rows() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for level in Level::available() {
        for bits in BITS {
            for d in [32, 64, 96, 128, 256, 512] {
                let [keys, values] = [Side::K, Side::V].map(|side| open_at(bits, side, d, json!({}), level));
                for (n_rows, first, n) in [(1, 0, 128), (2, 127, 1), (3, 5, 64), (7, 1, 127), (8, 9, 3), (5, 60, 13)] {
                    check_kernels(&keys, &values, &mut rng, n_rows, first, n);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_bytes_of_a_tile_give_some_floats(
        seed in any::<u64>(), which in 0usize..6, first in 0usize..128, n in 0usize..=128, values in any::<bool>(),
    ) {
        let n = n.min(PAGE_TOKENS - first);
        for level in Level::available() {
            let side = if values { Side::V } else { Side::K };
            let codec = open_at(BITS[which], side, 96, json!({}), level);
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let tile: Vec<u8> = (0..codec.facts().tile_bytes).map(|_| rng.random()).collect();
            decoded(&codec, &tile, first, n);
            let mut out = vec![0.0; 3 * 96.max(n)];
            if values {
                let weights = vec![0.5; 3 * n];
                codec.accumulate(Rows::new(&weights, 3, n, n), &tile, first, RowsMut::new(&mut out, 3, 96, 96)).unwrap();
            } else {
                let space = &mut aligned(3 * codec.query_bytes());
                let prepared = bytes_of(space, 3 * codec.query_bytes());
                codec.score(prepared, &tile, first, RowsMut::new(&mut out, 3, n, n)).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_opened_or_appended_is_refused_in_one_sentence() {
    let plugin =
        CodecPlugin::new(Instance::create(opencoti_kv_kvarn::root(), "{}", Arc::new(NoSink)).unwrap()).unwrap();
    let refused = |codec: &str, options: &str, head_dim| {
        let error = plugin.open(codec, options, Side::V, head_dim).map(|_| ()).unwrap_err();
        assert_eq!(error.status, Status::UNSUPPORTED);
        error.message
    };
    assert_eq!(
        refused("kvarn4", "{}", 80),
        "the head size is 80, expected a multiple of 32 up to 1024 for codec `kvarn4`"
    );
    assert_eq!(
        refused("kvarn7", "{}", 64),
        "kv-kvarn has no codec `kvarn7`; it has kvarn2, kvarn3, kvarn4, kvarn5, kvarn6, kvarn8"
    );
    assert_eq!(
        refused("kvarn4", r#"{"rotation":"none"}"#, 64),
        "option `rotation` is unknown; the KVarN codecs take `floor`, `clip`"
    );
    assert_eq!(refused("kvarn4", r#"{"clip":3}"#, 64), r#"option `clip` is 3, expected "search" or "none""#);
    assert_eq!(
        refused("kvarn4", r#"{"floor":"low"}"#, 64),
        r#"option `floor` is "low", expected "wide" or "reference""#
    );
    let codec = open(4, Side::K, 64);
    let mut tile = vec![0; codec.facts().tile_bytes];
    let error = codec.append(&mut tile, 3, Rows::new(&[0.0; 64], 1, 64, 64)).unwrap_err();
    assert_eq!(error.message, "KVarN encodes pages of 128 tokens as a whole, not 1 from slot 3");
}
