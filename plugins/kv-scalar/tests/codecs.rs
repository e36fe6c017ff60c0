//! What the codecs promise: golden bytes, errors of a Gaussian, kernels that agree with decoding, and no panic on any
//! bytes.

use std::sync::Arc;

use opencoti_kv_scalar::{BLOCK, Level, ScalarCodec, block_size, wht};
use opencoti_plugin_api::cpu_tiles::CpuTiles;
use opencoti_plugin_api::host::{CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{KvCodec, OpenParams, Rows, RowsMut, Side};
use opencoti_plugin_api::{PAGE_TOKENS, Status};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const NAMES: [&str; 7] = ["f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];

fn open_at(name: &str, head_dim: usize, rotated: bool, level: Level) -> ScalarCodec {
    let rotation = if rotated { "hadamard" } else { "none" };
    let options = serde_json::json!({ "rotation": rotation });
    ScalarCodec::open(&OpenParams { codec: name.into(), options, side: Side::K, head_dim }, level).unwrap()
}

fn open(name: &str, head_dim: usize) -> ScalarCodec {
    open_at(name, head_dim, false, Level::detect())
}

fn gaussian(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

fn rows(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Vec<f32> {
    (0..n * d).map(|_| gaussian(rng)).collect()
}

fn encoded(codec: &ScalarCodec, values: &[f32]) -> Vec<u8> {
    let facts = codec.facts();
    let mut tile = vec![0xa5; facts.tile_bytes];
    let d = facts.head_dim;
    codec.append(&mut tile, 0, Rows::new(values, values.len() / d, d, d)).unwrap();
    tile
}

fn decoded(codec: &ScalarCodec, tile: &[u8], first: usize, n: usize) -> Vec<f32> {
    let d = codec.facts().head_dim;
    let mut out = vec![0.0; n * d];
    codec.decode_page(tile, first, RowsMut::new(&mut out, n, d, d)).unwrap();
    out
}

#[test]
fn rows_match_the_golden_vectors_byte_for_byte() {
    let x: Vec<f32> = (0..32).map(|i| ((95 * i + 95) % 127) as f32 / 16.0 - 63.0 / 16.0).collect();
    let golden = [
        ("q8_0", "f0274100bf7f3efebd7d3cfcbb7b3afab97938f8b77736f6b57534f4b37332f2b171", 1.77455e-5),
        ("q6_0", "ecaf55aaff0055aaff0020202020203131313131313131424242", 2.23482e-4),
        ("q5_1", "9532e0c09999999946bc12ef45ac12df45ab02de35ab01de", 6.05581e-4),
        ("q5_0", "e0b36666666698109810981098109821a921a921a921", 9.14295e-4),
        ("q4_0", "e0b74498dc105498dc105498dc105498dc10", 3.61671e-3),
    ];
    for (name, bytes, error) in golden {
        let codec = open(name, 32);
        let tile = encoded(&codec, &x);
        let hex: String = codec.ggml_row(&tile, 0).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, bytes, "{name}");
        let mse = relative_mse(&x, &decoded(&codec, &tile, 0, 1));
        assert!((mse / error - 1.0).abs() < 1e-4, "{name}: {mse} instead of {error}");
    }
}

#[test]
fn f16_and_bf16_rows_are_the_rounded_values() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let x = rows(&mut rng, PAGE_TOKENS, 96);
    for name in ["f16", "bf16"] {
        let codec = open(name, 96);
        let tile = encoded(&codec, &x);
        let expected = |v: f32| match name {
            "f16" => half::f16::from_f32(v).to_f32(),
            _ => half::bf16::from_f32(v).to_f32(),
        };
        assert!(decoded(&codec, &tile, 0, PAGE_TOKENS).iter().zip(&x).all(|(&y, &v)| y == expected(v)));
    }
}

fn relative_mse(x: &[f32], y: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (&x, &y) in x.iter().zip(y) {
        error += f64::from(x - y).powi(2);
        norm += f64::from(x).powi(2);
    }
    error / norm
}

#[test]
fn gaussian_errors_are_the_published_ones() {
    let expected = [
        ("q8_0", 2.860e-5, 0.999986),
        ("q6_0", 4.442e-4, 0.999778),
        ("q5_1", 1.431e-3, 0.999290),
        ("q5_0", 1.823e-3, 0.999096),
        ("q4_0", 7.377e-3, 0.996345),
    ];
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let n_tiles = 160;
    let x: Vec<Vec<f32>> = (0..n_tiles).map(|_| rows(&mut rng, PAGE_TOKENS, 128)).collect();
    for (name, mse, cosine) in expected {
        for rotated in [false, true] {
            let codec = open_at(name, 128, rotated, Level::detect());
            let (mut sum_mse, mut sum_cosine) = (0.0, 0.0);
            for x in &x {
                let mut y = decoded(&codec, &encoded(&codec, x), 0, PAGE_TOKENS);
                codec.transform_output(RowsMut::new(&mut y, PAGE_TOKENS, 128, 128)).unwrap();
                sum_mse += relative_mse(x, &y);
                for (x, y) in x.chunks(128).zip(y.chunks(128)) {
                    sum_cosine += dot(x, y) / (dot(x, x) * dot(y, y)).sqrt();
                }
            }
            let got = sum_mse / n_tiles as f64;
            assert!((got / mse - 1.0).abs() < 0.02, "{name}: {got} instead of {mse}");
            let got = sum_cosine / (n_tiles * PAGE_TOKENS) as f64;
            assert!((got - cosine).abs() < 1e-3, "{name}: {got} instead of {cosine}");
        }
    }
}

#[test]
fn a_rotation_tames_outlier_channels() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut x = rows(&mut rng, PAGE_TOKENS, 128);
    for row in x.chunks_mut(128) {
        for c in [3, 40, 77, 127] {
            row[c] *= 8.0;
        }
    }
    for (name, gain) in [("q8_0", 3.0), ("q6_0", 3.0), ("q5_0", 3.0), ("q4_0", 2.5)] {
        let [plain, rotated] = [false, true].map(|rotated| {
            let codec = open_at(name, 128, rotated, Level::detect());
            let mut y = decoded(&codec, &encoded(&codec, &x), 0, PAGE_TOKENS);
            codec.transform_output(RowsMut::new(&mut y, PAGE_TOKENS, 128, 128)).unwrap();
            relative_mse(&x, &y)
        });
        assert!(rotated * gain < plain, "{name}: {rotated} rotated, {plain} plain");
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[test]
fn the_transform_is_its_own_inverse_and_keeps_products() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for d in [32, 64, 96, 128, 160, 256, 512] {
        let (q, k) = (rows(&mut rng, 1, d), rows(&mut rng, 1, d));
        let (mut hq, mut hk) = (q.clone(), k.clone());
        wht(&mut hq, block_size(d));
        wht(&mut hk, block_size(d));
        let scale = (dot(&q, &q) * dot(&k, &k)).sqrt();
        assert!((dot(&hq, &hk) - dot(&q, &k)).abs() < 1e-5 * scale);
        wht(&mut hq, block_size(d));
        assert!(q.iter().zip(&hq).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}

#[test]
fn a_tile_has_the_size_of_its_format() {
    let bytes = [16384, 16384, 8704, 6656, 6144, 5632, 4608];
    for (name, bytes) in NAMES.into_iter().zip(bytes) {
        for d in [64, 128, 256, 512] {
            let facts = open(name, d).facts();
            assert_eq!(facts.tile_bytes, bytes * d / 64, "{name}");
            assert_eq!(facts.bits_per_value, bytes as f32 / 1024.0);
        }
    }
}

#[test]
fn slots_are_independent_of_how_rows_arrive() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let x = rows(&mut rng, PAGE_TOKENS, 64);
    for name in NAMES {
        for rotated in [false, true] {
            let codec = open_at(name, 64, rotated, Level::detect());
            let whole = encoded(&codec, &x);
            let mut piecewise = vec![0; whole.len()];
            let mut slot = 0;
            for n in [1, 2, 30, 7, 88] {
                let rows = Rows::new(&x[slot * 64..], n, 64, 64);
                codec.append(&mut piecewise, slot, rows).unwrap();
                slot += n;
            }
            assert_eq!(slot, PAGE_TOKENS);
            assert!(whole == piecewise, "{name}");
        }
    }
}

#[test]
fn every_instruction_set_decodes_alike() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for name in NAMES {
        for d in [32, 96, 256] {
            let tile = encoded(&open(name, d), &rows(&mut rng, PAGE_TOKENS, d));
            let [first, rest @ ..] = &Level::available()[..] else { panic!("no level") };
            let reference = decoded(&open_at(name, d, false, *first), &tile, 3, 100);
            for &level in rest {
                assert!(reference == decoded(&open_at(name, d, false, level), &tile, 3, 100), "{name} {level:?}");
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

/// Half a step of values rounded to 16 bits, as a share of the largest.
const ROUNDING: f64 = 0.5 / 32767.0;

/// Largest magnitude.
fn largest<'a>(values: impl IntoIterator<Item = &'a f32>) -> f64 {
    values.into_iter().fold(0.0, |m, &v| f64::from(v).abs().max(m))
}

/// The kernels against products with decoded rows in f64, relative to the sum of magnitudes. Those of integer codes may be
/// off by what their rounding of queries and weights can do at worst.
fn check_kernels(codec: &ScalarCodec, rounding: f64, rng: &mut ChaCha8Rng, n_rows: usize, first: usize, n: usize) {
    let d = codec.facts().head_dim;
    let mut x = rows(rng, PAGE_TOKENS, d);
    // An outlier in the last element of every row shows a kernel that stops early.
    x.chunks_mut(d).for_each(|row| row[d - 1] = 30.0);
    let tile = encoded(codec, &x);
    let stored = decoded(codec, &tile, first, n);
    let q = rows(rng, n_rows, d);
    let mut space = aligned(n_rows * codec.query_bytes());
    let prepared = bytes_of(&mut space, n_rows * codec.query_bytes());
    codec.prepare_query(Rows::new(&q, n_rows, d, d), prepared).unwrap();
    let mut turned = q;
    codec.transform_query(RowsMut::new(&mut turned, n_rows, d, d)).unwrap();

    let stride = n + 3;
    let mut scores = vec![f32::NAN; n_rows * stride];
    codec.score(prepared, &tile, first, RowsMut::new(&mut scores, n_rows, n, stride)).unwrap();
    for r in 0..n_rows {
        let q = &turned[r * d..][..d];
        for t in 0..n {
            let k = &stored[t * d..][..d];
            let magnitude: f64 = q.iter().zip(k).map(|(a, b)| f64::from(a * b).abs()).sum();
            let rounding = rounding * largest(q) * k.iter().map(|&k| f64::from(k).abs()).sum::<f64>();
            assert!((f64::from(scores[r * stride + t]) - dot(q, k)).abs() <= 1e-5 * magnitude + rounding);
        }
        assert!(scores[r * stride + n..][..3].iter().all(|s| s.is_nan()), "written beyond the asked slots");
    }

    let weights: Vec<f32> = (0..n_rows * stride).map(|_| rng.random()).collect();
    let start = rows(rng, n_rows, d);
    let mut acc = start.clone();
    let w = Rows::new(&weights, n_rows, n, stride);
    codec.accumulate(w, &tile, first, RowsMut::new(&mut acc, n_rows, d, d)).unwrap();
    for r in 0..n_rows {
        for i in 0..d {
            let terms = (0..n).map(|t| f64::from(weights[r * stride + t]) * f64::from(stored[t * d + i]));
            let start = f64::from(start[r * d + i]);
            let (sum, magnitude) = terms.fold((start, start.abs()), |(s, m), x| (s + x, m + x.abs()));
            let block = i / BLOCK * BLOCK..(i / BLOCK + 1) * BLOCK;
            let most = largest((0..n).flat_map(|t| &stored[t * d..][block.clone()]));
            // Eight-bit codes from raw bytes reach 128, those that were encoded 127.
            let rounding = 128.0 / 127.0 * rounding * n as f64 * largest(&weights[r * stride..][..n]) * most;
            assert!((f64::from(acc[r * d + i]) - sum).abs() <= 1e-5 * magnitude + rounding);
        }
    }
}

#[test]
fn kernels_agree_with_products_of_decoded_rows() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for level in Level::available() {
        for name in NAMES {
            for (d, rotated) in [(32, false), (64, true), (96, true), (128, false), (256, true), (512, false)] {
                let codec = open_at(name, d, rotated, level);
                let rounding = if ["f16", "bf16"].contains(&name) { 0.0 } else { ROUNDING };
                for (n_rows, first, n) in [(1, 0, 128), (2, 127, 1), (3, 5, 64), (7, 1, 127), (8, 9, 3), (64, 60, 13)] {
                    check_kernels(&codec, rounding, &mut rng, n_rows, first, n);
                }
            }
        }
    }
}

#[test]
fn zeros_and_extremes_encode_without_panic() {
    for name in NAMES {
        let codec = open(name, 32);
        assert!(decoded(&codec, &encoded(&codec, &[0.0; 32]), 0, 1).iter().all(|&v| v == 0.0), "{name}");
        for extreme in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 4.0] {
            let mut x = [1.0; 32];
            x[31] = extreme;
            decoded(&codec, &encoded(&codec, &x), 0, 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_of_a_tile_give_some_floats(
        seed in any::<u64>(), which in 0usize..7, first in 0usize..128, n in 0usize..=128, n_rows in 0usize..5,
    ) {
        let n = n.min(PAGE_TOKENS - first);
        for level in Level::available() {
            let codec = open_at(NAMES[which], 64, seed % 2 == 0, level);
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let tile: Vec<u8> = (0..codec.facts().tile_bytes).map(|_| rng.random()).collect();
            decoded(&codec, &tile, first, n);
            let mut space = aligned(n_rows * codec.query_bytes());
            let prepared = bytes_of(&mut space, n_rows * codec.query_bytes());
            let mut scores = vec![0.0; n_rows * n];
            codec.score(prepared, &tile, first, RowsMut::new(&mut scores, n_rows, n, n)).unwrap();
            let mut acc = vec![0.0; n_rows * 64];
            codec
                .accumulate(Rows::new(&scores, n_rows, n, n), &tile, first, RowsMut::new(&mut acc, n_rows, 64, 64))
                .unwrap();
        }
    }
}

fn plugin() -> CodecPlugin {
    CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink)).unwrap()).unwrap()
}

#[test]
fn what_cannot_be_opened_is_refused_in_one_sentence() {
    let plugin = plugin();
    let refused = |codec: &str, options: &str, head_dim| {
        let error = plugin.open(codec, options, Side::V, head_dim).map(|_| ()).unwrap_err();
        assert_eq!(error.status, Status::UNSUPPORTED);
        error.message
    };
    assert_eq!(refused("q8_0", "{}", 80), "the head size is 80, expected a multiple of 32 up to 1024 for codec `q8_0`");
    assert!(refused("f16", "", 0).starts_with("the head size is 0,"));
    assert!(refused("f16", "", 2048).starts_with("the head size is 2048,"));
    assert_eq!(
        refused("q3_9", "{}", 64),
        "kv-scalar has no codec `q3_9`; it has f16, bf16, q8_0, q6_0, q5_1, q5_0, q4_0"
    );
    assert_eq!(
        refused("q8_0", r#"{"rotate":true}"#, 64),
        "option `rotate` is unknown; the scalar codecs take `rotation`"
    );
    assert_eq!(
        refused("q8_0", r#"{"rotation":"givens"}"#, 64),
        r#"option `rotation` is "givens", expected "none" or "hadamard""#
    );
    assert_eq!(refused("q8_0", "[]", 64), "the codec's options are `[]`, expected an object");
    assert!(!plugin.instance().health().is_quarantined());
}

#[test]
fn a_config_key_is_refused() {
    let error =
        Instance::create(opencoti_kv_scalar::root(), r#"{"fast":1}"#, Arc::new(NoSink)).map(|_| ()).unwrap_err();
    assert_eq!(error.message, "kv-scalar has no config key `fast`; it takes none, remove it");
}

#[test]
fn the_abi_gives_the_codecs_and_their_kernels() {
    let plugin = plugin();
    let names: Vec<String> = plugin.codecs().unwrap().into_iter().map(|c| c.name).collect();
    assert_eq!(names, NAMES);
    for name in NAMES {
        let codec = plugin.open(name, r#"{"rotation":"hadamard"}"#, Side::K, 128).unwrap();
        assert!(codec.is_rotated());
        // f32, or 16 bits with a factor and the sum of each block.
        let bytes = if ["f16", "bf16"].contains(&name) { 512 } else { 320 };
        assert_eq!(codec.cpu_tiles().map(|t| t.query_bytes()), Some(bytes), "{name}");
    }
}
