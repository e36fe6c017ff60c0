//! The token-wise codecs of rotated groups from outside: golden bytes, errors of a Gaussian, slopes, kernels that agree with
//! decoding, and no panic on any bytes.

use opencoti_kv_common::{GroupCodec, Level};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::cpu_tiles::CpuTiles;
use opencoti_plugin_api::kv_codec::{KvCodec, OpenParams, Rows, RowsMut, Side};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const TURBO: [&str; 4] = ["turbo2", "turbo3", "turbo4", "turbo8"];
const NAMES: [&str; 6] = ["turbo2", "turbo3", "turbo4", "turbo8", "turbo2_tcq", "turbo3_tcq"];
const HEAD_DIMS: [usize; 5] = [64, 96, 128, 256, 512];

fn open_with(name: &str, head_dim: usize, options: Value, side: Side, level: Level) -> GroupCodec {
    let params = OpenParams { codec: name.into(), options, side, head_dim };
    let open = if TURBO.contains(&name) { opencoti_kv_turbo::open } else { opencoti_kv_tcq::open };
    open(&params, level).unwrap()
}

fn open(name: &str, head_dim: usize) -> GroupCodec {
    open_with(name, head_dim, json!({}), Side::K, Level::detect())
}

/// The codec with the scale that public code stores.
fn open_public(name: &str, head_dim: usize) -> GroupCodec {
    let options = if name == "turbo8" { json!({}) } else { json!({"scale": "norm"}) };
    open_with(name, head_dim, options, Side::K, Level::detect())
}

fn gaussian(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

fn rows(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Vec<f32> {
    (0..n * d).map(|_| gaussian(rng)).collect()
}

fn encoded(codec: &GroupCodec, values: &[f32]) -> Vec<u8> {
    let facts = codec.facts();
    let mut tile = vec![0xa5; facts.tile_bytes];
    let d = facts.head_dim;
    codec.append(&mut tile, 0, Rows::new(values, values.len() / d, d, d)).unwrap();
    tile
}

/// Rows in the codec's basis.
fn decoded(codec: &GroupCodec, tile: &[u8], first: usize, n: usize) -> Vec<f32> {
    let d = codec.facts().head_dim;
    let mut out = vec![0.0; n * d];
    codec.decode_page(tile, first, RowsMut::new(&mut out, n, d, d)).unwrap();
    out
}

/// Rows that went through the codec and back to the plain basis.
fn through(codec: &GroupCodec, values: &[f32]) -> Vec<f32> {
    let d = codec.facts().head_dim;
    let n = values.len() / d;
    let mut out = decoded(codec, &encoded(codec, values), 0, n);
    codec.transform_output(RowsMut::new(&mut out, n, d, d)).unwrap();
    out
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn relative_mse(x: &[f32], y: &[f32]) -> f64 {
    let difference: Vec<f32> = x.iter().zip(y).map(|(x, y)| x - y).collect();
    dot(&difference, &difference) / dot(x, x)
}

fn golden_input() -> Vec<f32> {
    (0..128).map(|i| (((95 * i + 95) % 127) as f32 - 63.0) / 16.0).collect()
}

#[test]
fn the_rotation_gives_the_published_values() {
    let x = golden_input();
    let norm = dot(&x, &x).sqrt();
    assert!((norm - 25.898_841_67).abs() < 1e-6);
    let mut y: Vec<f32> = x.iter().map(|v| v / norm as f32).collect();
    open("turbo3", 128).transform_query(RowsMut::new(&mut y, 1, 128, 128)).unwrap();
    let expected = [-0.036_261, -0.037_115, 0.037_115, 0.051_619, 0.239_325, -0.103_665, 0.187_279, -0.099_399];
    assert!(y.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{:?}", &y[..8]);
}

#[test]
fn rows_match_the_golden_vectors_byte_for_byte() {
    let golden = [
        ("turbo2", "e14ea533c45550e0554996fc75b4ad89d6d94747aa737599746d9a999251a54bd066", 1.03161e-1),
        (
            "turbo3",
            "714e4f77d9eeb0d4fed73db8ef3d1a12b8a2ee9e01a7ee73ec9b607624b65fd2b5c85c08c020e9c4aea9115fa464ab093c58",
            3.21686e-2,
        ),
        (
            "turbo4",
            "784e66a93f3e54e27575115632eb657696646a96b1de677c739fd48a958359d784d57b747d529a893d5d756d96a7717dc66a89b5a4a6\
             3885355676ab8c6344c75879",
            8.73438e-3,
        ),
        (
            "turbo8",
            "33466c6c939bff48e34b4d5b30d86578607d17196d622c46a8d85c6d6d7d72984e6f9e6e6f8d23b2e1c47369c37d4873f78e57ce9d82\
             5e8e468496677fc5528462c5b1745076cc78375da0948d82d43cd15e617cd1716f8e7f9f287fc47772bc9b68958867aa579e6fa08b47\
             5a80634469616c78a59ec0873d6d4c4d7cc18362947e",
            3.66042e-5,
        ),
        ("turbo2_tcq", "ad4ea4f54d7436543c96653bfd1d1c278a72b1f8d0ee894f1d289fa61331909e42ad1a00", 8.69540e-2),
        (
            "turbo3_tcq",
            "574e43c45f07068b244005bdb4b42127c1b7e621afeca669a587f999bd99e93e9fe2a424eac88d97aba2a50a53d49e6042371600",
            2.05395e-2,
        ),
    ];
    let x = golden_input();
    for (name, bytes, error) in golden {
        let codec = open_public(name, 128);
        let tile = encoded(&codec, &x);
        let hex: String = codec.public_row(&tile, 0).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, bytes, "{name}");
        let mse = relative_mse(&x, &through(&codec, &x));
        assert!((mse / error - 1.0).abs() < 1e-3, "{name}: {mse} instead of {error}");
    }
}

#[test]
fn gaussian_errors_are_the_published_ones() {
    // Relative squared error and cosine with the public scale, from 20480 rows of 128.
    let expected = [
        ("turbo2", 0.11882, 0.940_607, 0.04),
        ("turbo3", 0.033757, 0.983_126, 0.02),
        ("turbo4", 9.170e-3, 0.995_416, 0.02),
        ("turbo8", 4.150e-5, 0.999_979, 0.02),
        ("turbo2_tcq", 0.0793, 0.9600, 0.04),
        ("turbo3_tcq", 0.0211, 0.989_4, 0.02),
    ];
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let n_tiles = 160;
    let x: Vec<Vec<f32>> = (0..n_tiles).map(|_| rows(&mut rng, PAGE_TOKENS, 128)).collect();
    for (name, mse, cosine, tolerance) in expected {
        let codec = open_public(name, 128);
        let (mut sum_mse, mut sum_cosine) = (0.0, 0.0);
        for x in &x {
            let y = through(&codec, x);
            sum_mse += relative_mse(x, &y);
            for (x, y) in x.chunks(128).zip(y.chunks(128)) {
                sum_cosine += dot(x, y) / (dot(x, x) * dot(y, y)).sqrt();
            }
        }
        let got = sum_mse / f64::from(n_tiles);
        let found = sum_cosine / f64::from(n_tiles * PAGE_TOKENS as i32);
        println!("{name}: relative squared error {got:.6}, cosine {found:.6}");
        assert!((got / mse - 1.0).abs() < tolerance, "{name}: {got} instead of {mse}");
        assert!((found - cosine).abs() < 1e-3, "{name}: {found} instead of {cosine}");
    }
}

#[test]
fn each_rule_of_the_scale_has_the_slope_and_error_that_theory_gives() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let x: Vec<f32> = rows(&mut rng, PAGE_TOKENS, 512);
    for name in ["turbo2", "turbo3", "turbo4", "turbo2_tcq", "turbo3_tcq"] {
        // Squared cosine by the rule that has the error 1 - r^2.
        let of = |scale: &str| {
            let options = json!({ "scale": scale });
            let y = through(&open_with(name, 512, options, Side::K, Level::detect()), &x);
            (dot(&x, &y) / dot(&x, &x), relative_mse(&x, &y))
        };
        let (slope, least) = of("least-squares");
        let r2 = 1.0 - least;
        assert!((slope - r2).abs() < 0.003, "{name}: least squares has slope {slope}, expected {r2}");
        let (slope, error) = of("norm");
        assert!((slope - r2.sqrt()).abs() < 0.003, "{name}: norm has slope {slope}, expected {}", r2.sqrt());
        assert!((error / (2.0 - 2.0 * r2.sqrt()) - 1.0).abs() < 0.03, "{name}: norm has error {error}");
        let (slope, error) = of("unbiased");
        assert!((slope - 1.0).abs() < 0.003, "{name}: unbiased has slope {slope}");
        assert!((error / (1.0 / r2 - 1.0) - 1.0).abs() < 0.03, "{name}: unbiased has error {error}");
    }
}

#[test]
fn keys_are_unbiased_and_values_of_least_error_unless_told() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let x = rows(&mut rng, 8, 128);
    for (side, scale) in [(Side::K, "unbiased"), (Side::V, "least-squares")] {
        let [silent, told] = [json!({}), json!({ "scale": scale })]
            .map(|options| encoded(&open_with("turbo3", 128, options, side, Level::detect()), &x));
        assert!(silent == told, "{side}");
    }
}

#[test]
fn public_scales_keep_the_norm() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for name in NAMES.iter().filter(|n| **n != "turbo8") {
        for d in HEAD_DIMS {
            let x = rows(&mut rng, 20, d);
            let y = through(&open_public(name, d), &x);
            for (x, y) in x.chunks(d).zip(y.chunks(d)) {
                let ratio = (dot(y, y) / dot(x, x)).sqrt();
                assert!((ratio - 1.0).abs() < 1e-3, "{name} {d}: {ratio}");
            }
        }
    }
}

/// A row as public code lays it out, cut into the scales and the codes of its groups.
fn parts(codec: &GroupCodec, x: &[f32]) -> (Vec<[u8; 2]>, Vec<Vec<u8>>) {
    let groups = x.len() / x.len().min(128);
    let row = codec.public_row(&encoded(codec, x), 0);
    let block = row.chunks(row.len() / groups);
    block.map(|b| ([b[0], b[1]], b[2..].to_vec())).unzip()
}

#[test]
fn a_power_of_two_changes_the_scale_alone() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for name in NAMES {
        for d in HEAD_DIMS {
            let codec = open(name, d);
            let x = rows(&mut rng, 1, d);
            let (scales, codes) = parts(&codec, &x);
            for power in [-6, 3] {
                let scaled: Vec<f32> = x.iter().map(|v| v * 2f32.powi(power)).collect();
                let (other_scales, other_codes) = parts(&codec, &scaled);
                assert!(codes == other_codes, "{name} {d}");
                for (a, b) in scales.iter().zip(other_scales) {
                    let [a, b] = [*a, b].map(|s| half(u16::from_le_bytes(s)));
                    assert_eq!(a * 2f64.powi(power), b, "{name} {d}");
                }
            }
        }
    }
}

/// A normal half float.
fn half(bits: u16) -> f64 {
    (1.0 + f64::from(bits & 1023) / 1024.0) * 2f64.powi(i32::from(bits >> 10 & 31) - 15)
}

#[test]
fn negation_flips_every_code() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for name in ["turbo2", "turbo3", "turbo4"] {
        for d in HEAD_DIMS {
            let codec = open(name, d);
            let x = rows(&mut rng, 1, d);
            let negated: Vec<f32> = x.iter().map(|v| -v).collect();
            let ((scales, codes), (other_scales, other_codes)) = (parts(&codec, &x), parts(&codec, &negated));
            assert_eq!(scales, other_scales);
            for (a, b) in codes.iter().flatten().zip(other_codes.iter().flatten()) {
                assert_eq!(*a, !*b, "{name} {d}");
            }
        }
    }
}

#[test]
fn a_tile_has_the_size_of_its_format() {
    let bytes = [
        ("turbo2", [2304, 3328, 4352]),
        ("turbo3", [3328, 4864, 6400]),
        ("turbo4", [4352, 6400, 8448]),
        ("turbo8", [8448, 12544, 16640]),
        ("turbo2_tcq", [128 * 20, 128 * 28, 4608]),
        ("turbo3_tcq", [128 * 28, 128 * 40, 6656]),
    ];
    for (name, bytes) in bytes {
        let sizes = [(64, bytes[0]), (96, bytes[1]), (128, bytes[2]), (256, 2 * bytes[2]), (512, 4 * bytes[2])];
        for (d, bytes) in sizes {
            let facts = open(name, d).facts();
            assert_eq!(facts.tile_bytes, bytes, "{name} {d}");
            assert_eq!(facts.bits_per_value, (bytes * 8) as f32 / (128 * d) as f32);
        }
    }
}

#[test]
fn slots_are_independent_of_how_rows_arrive() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let x = rows(&mut rng, PAGE_TOKENS, 64);
    for name in NAMES {
        let codec = open(name, 64);
        let whole = encoded(&codec, &x);
        let mut piecewise = vec![0; whole.len()];
        let mut slot = 0;
        for n in [1, 2, 30, 7, 88] {
            codec.append(&mut piecewise, slot, Rows::new(&x[slot * 64..], n, 64, 64)).unwrap();
            slot += n;
        }
        assert!(whole == piecewise, "{name}");
    }
}

#[test]
fn every_instruction_set_encodes_and_decodes_alike() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    for name in NAMES {
        for d in HEAD_DIMS {
            let x = rows(&mut rng, PAGE_TOKENS, d);
            let at = |level| open_with(name, d, json!({}), Side::K, level);
            let tile = encoded(&at(Level::Portable), &x);
            let reference = decoded(&at(Level::Portable), &tile, 3, 100);
            for level in Level::available() {
                assert!(tile == encoded(&at(level), &x), "{name} {d} {level:?}");
                assert!(reference == decoded(&at(level), &tile, 3, 100), "{name} {d} {level:?}");
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

/// The kernels against products with decoded rows in f64, relative to the sum of magnitudes.
fn check_kernels(codec: &GroupCodec, rng: &mut ChaCha8Rng, n_rows: usize, first: usize, n: usize) {
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
            assert!((f64::from(scores[r * stride + t]) - dot(q, k)).abs() <= 1e-5 * magnitude);
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
            assert!((f64::from(acc[r * d + i]) - sum).abs() <= 1e-5 * magnitude);
        }
    }
}

#[test]
fn kernels_agree_with_products_of_decoded_rows() {
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    for level in Level::available() {
        for name in NAMES {
            for d in HEAD_DIMS {
                let codec = open_with(name, d, json!({}), Side::K, level);
                for (n_rows, first, n) in [(1, 0, 128), (2, 127, 1), (3, 5, 64), (7, 1, 127), (8, 9, 3), (9, 60, 13)] {
                    check_kernels(&codec, &mut rng, n_rows, first, n);
                }
            }
        }
    }
}

#[test]
fn odd_values_harm_their_own_row_at_most() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    for name in NAMES {
        let codec = open(name, 128);
        assert!(through(&codec, &[0.0; 128]).iter().all(|&v| v == 0.0), "{name}");
        let tiny = through(&codec, &[1e-42; 128]);
        assert!(tiny.iter().all(|&v| v == 0.0), "{name}: less than a scale can tell is zero");
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut x = rows(&mut rng, 3, 128);
            let calm = through(&codec, &x);
            x[128 + 127] = odd;
            let y = through(&codec, &x);
            assert!(y.iter().all(|v| v.is_finite()), "{name}: {odd} spreads");
            assert!(y[..128] == calm[..128] && y[256..] == calm[256..], "{name}");
        }
    }
}

#[test]
fn what_cannot_be_opened_is_refused_in_one_sentence() {
    let refused = |codec: &str, options: Value, head_dim| {
        let params = OpenParams { codec: codec.into(), options, side: Side::V, head_dim };
        let open = if codec.ends_with("tcq") { opencoti_kv_tcq::open } else { opencoti_kv_turbo::open };
        open(&params, Level::detect()).map(|_| ()).unwrap_err().message
    };
    assert_eq!(
        refused("turbo3", json!({}), 80),
        "the head size is 80, expected 64, 96 or a multiple of 128 up to 1024 for codec `turbo3`"
    );
    assert!(refused("turbo3_tcq", json!({}), 0).starts_with("the head size is 0,"));
    assert_eq!(
        refused("turbo5", json!({}), 64),
        "kv-turbo has no codec `turbo5`; it has turbo2, turbo3, turbo4, turbo8"
    );
    assert_eq!(refused("turbo1_tcq", json!({}), 64), "kv-tcq has no codec `turbo1_tcq`; it has turbo2_tcq, turbo3_tcq");
    assert_eq!(
        refused("turbo3", json!({"rotation": "none"}), 64),
        "option `rotation` is unknown; the turbo codecs take `scale`"
    );
    assert_eq!(
        refused("turbo2_tcq", json!({"scale": "big"}), 64),
        r#"option `scale` is "big", expected "least-squares", "unbiased" or "norm""#
    );
    assert_eq!(
        refused("turbo8", json!({"scale": "norm"}), 64),
        "option `scale` is unknown; the `turbo8` codecs take none"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_of_a_tile_give_some_floats(
        seed in any::<u64>(), which in 0usize..6, dim in 0usize..3, first in 0usize..128, n in 0usize..=128,
        n_rows in 0usize..5,
    ) {
        let (n, d) = (n.min(PAGE_TOKENS - first), HEAD_DIMS[dim]);
        for level in Level::available() {
            let codec = open_with(NAMES[which], d, json!({}), Side::K, level);
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let tile: Vec<u8> = (0..codec.facts().tile_bytes).map(|_| rng.random()).collect();
            decoded(&codec, &tile, first, n);
            let mut space = aligned(n_rows * codec.query_bytes());
            let prepared = bytes_of(&mut space, n_rows * codec.query_bytes());
            let mut scores = vec![0.0; n_rows * n];
            codec.score(prepared, &tile, first, RowsMut::new(&mut scores, n_rows, n, n)).unwrap();
            let mut acc = vec![0.0; n_rows * d];
            codec
                .accumulate(Rows::new(&scores, n_rows, n, n), &tile, first, RowsMut::new(&mut acc, n_rows, d, d))
                .unwrap();
        }
    }
}
