//! Nanoseconds to decode a tile, and to score and sum it for 1, 3, 4 and 8 query rows: the best of some rounds, on one
//! thread, with the tile in the first-level cache. Divided by a tile's bytes this says whether a codec can keep up with
//! memory.
//!
//!     cargo bench -p opencoti-kv-scalar --bench tiles [CODEC] [HEAD_DIM]

use std::hint::black_box;
use std::time::Instant;

use opencoti_kv_scalar::{Level, ScalarCodec};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::cpu_tiles::CpuTiles;
use opencoti_plugin_api::kv_codec::{KvCodec, OpenParams, Rows, RowsMut, Side};

const NAMES: [&str; 7] = ["f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];
const HEAD_DIMS: [usize; 3] = [64, 128, 256];
const ROWS: [usize; 4] = [1, 3, 4, 8];
const ROUNDS: usize = 60;
const TIMES: usize = 20;

/// Nanoseconds of one call, the best round.
fn time(mut f: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        (0..TIMES).for_each(|_| f());
        best = best.min(start.elapsed().as_nanos() as f64 / TIMES as f64);
    }
    best
}

fn measure(name: &str, d: usize) {
    let params = OpenParams { codec: name.into(), options: serde_json::json!({}), side: Side::K, head_dim: d };
    let codec = ScalarCodec::open(&params, Level::detect()).unwrap();
    let mut rows: Vec<f32> = (0..PAGE_TOKENS * d).map(|i| ((i * 7919) % 1013) as f32 / 500.0 - 1.0).collect();
    let mut tile = vec![0; codec.facts().tile_bytes];
    codec.encode_page(&mut tile, Rows::new(&rows, PAGE_TOKENS, d, d)).unwrap();
    let decode = time(|| codec.decode_page(black_box(&tile), 0, RowsMut::new(&mut rows, PAGE_TOKENS, d, d)).unwrap());
    print!("{name:5} {d:4} {:6} bytes: decode {decode:6.0}", tile.len());
    for n in ROWS {
        let mut space = vec![[0u64; 8]; n * codec.query_bytes() / 64];
        // SAFETY: plain words.
        let prepared = unsafe { space.align_to_mut::<u8>().1 };
        codec.prepare_query(Rows::new(&rows, n, d, d), prepared).unwrap();
        let mut scores = vec![0.0; n * PAGE_TOKENS];
        let score = time(|| {
            let to = RowsMut::new(&mut scores, n, PAGE_TOKENS, PAGE_TOKENS);
            codec.score(prepared, black_box(&tile), 0, to).unwrap();
        });
        let mut acc = vec![0.0; n * d];
        let sum = time(|| {
            let weights = Rows::new(&scores, n, PAGE_TOKENS, PAGE_TOKENS);
            codec.accumulate(weights, black_box(&tile), 0, RowsMut::new(&mut acc, n, d, d)).unwrap();
        });
        print!("; {n} rows {score:6.0} + {sum:6.0}");
    }
    println!();
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    for name in NAMES.iter().filter(|name| args.first().is_none_or(|a| a == *name)) {
        for d in HEAD_DIMS.iter().filter(|d| args.get(1).is_none_or(|a| *a == d.to_string())) {
            measure(name, *d);
        }
    }
}
