//! The checks of one opened codec. Each returns a sentence when it does not hold.

use super::page::{Block, Tile, dot, into_domain, normal, out_of_domain, relative_error, same};
use crate::PAGE_TOKENS;
use crate::host::{Codec, CpuTilesRef};
use crate::kv_codec::Side;

/// A transform and its inverse, and products across it, in f32.
const ORTHONORMAL: f64 = 1e-4;
/// Scores of a codec's own kernels, over |q||k|: they may quantise the query to 8 bits.
const SCORE: f64 = 0.02;
/// Sums of a codec's own kernels, over the sum of |w||v|.
const ACCUMULATE: f64 = 0.01;

/// Runs all checks; the relative error of a round trip.
pub(super) fn run(codec: &Codec, again: &dyn Fn() -> Result<Codec, String>, max_error: f64) -> Result<f64, String> {
    let d = codec.head_dim();
    let rows = normal(PAGE_TOKENS * d, 1 + d as u64);
    let mut tile = Tile::new(codec, 0xa5);
    tile.encode(codec, &rows)?;
    layout_is_plausible(codec)?;
    let error = round_trip(codec, &tile, &rows, max_error)?;
    sub_ranges_agree(codec, &tile)?;
    garbage_in_the_tile_does_not_matter(codec, &tile, &rows)?;
    if codec.layout().stage_tokens == 0 {
        earlier_slots_stay(codec, &rows)?;
        pieces_agree(codec, &tile, &rows)?;
    }
    transforms_are_orthonormal(codec)?;
    odd_values_are_taken(codec)?;
    if let Some(tiles) = codec.cpu_tiles() {
        match codec.side() {
            Side::K => scores_agree(codec, tiles, &tile)?,
            Side::V => sums_agree(codec, tiles, &tile)?,
        }
    }
    threads_agree(codec, &tile, &rows)?;
    reopening_agrees(codec, &again()?, &tile)?;
    Ok(error)
}

fn layout_is_plausible(codec: &Codec) -> Result<(), String> {
    let layout = codec.layout();
    let there = layout.tile_bytes as f64 * 8.0 / (PAGE_TOKENS * codec.head_dim()) as f64;
    let stated = f64::from(layout.bits_per_value);
    if !(stated > 0.0 && stated <= there * 1.001) {
        return Err(format!("`bits_per_value` is {stated}, expected above 0 and at most the {there} of a tile"));
    }
    Ok(())
}

fn round_trip(codec: &Codec, tile: &Tile, rows: &[f32], max_error: f64) -> Result<f64, String> {
    let decoded = out_of_domain(codec, tile.decode(codec, 0, PAGE_TOKENS)?)?;
    let error = relative_error(rows, &decoded);
    match error <= max_error {
        true => Ok(error),
        false => Err(format!("a page comes back with a relative error of {error:.3}, expected at most {max_error}")),
    }
}

fn sub_ranges_agree(codec: &Codec, tile: &Tile) -> Result<(), String> {
    let d = codec.head_dim();
    let whole = tile.decode(codec, 0, PAGE_TOKENS)?;
    for (first, n) in [(0, 0), (0, 1), (127, 1), (3, 5), (31, 34), (64, 64), (1, 127)] {
        if !same(&tile.decode(codec, first, n)?, &whole[first * d..(first + n) * d]) {
            return Err(format!("slots {first}..{} decode otherwise alone than within the page", first + n));
        }
    }
    let (stride, gap) = (d + 5, 1234.5);
    let apart = tile.decode_apart(codec, 17, 9, stride, gap)?;
    for (i, row) in apart.chunks_exact(stride).enumerate() {
        if !same(&row[..d], &whole[(17 + i) * d..(18 + i) * d]) {
            return Err("rows decode otherwise when they are apart: the stride is not respected".into());
        }
        if row[d..].iter().any(|x| *x != gap) {
            return Err("`decode_page` writes between the rows".into());
        }
    }
    Ok(())
}

fn garbage_in_the_tile_does_not_matter(codec: &Codec, tile: &Tile, rows: &[f32]) -> Result<(), String> {
    let mut other = Tile::new(codec, 0xff);
    other.encode(codec, rows)?;
    agree(codec, tile, &other, "a page encodes otherwise into a tile with other bytes")
}

fn agree(codec: &Codec, a: &Tile, b: &Tile, otherwise: &str) -> Result<(), String> {
    match same(&a.decode(codec, 0, PAGE_TOKENS)?, &b.decode(codec, 0, PAGE_TOKENS)?) {
        true => Ok(()),
        false => Err(otherwise.to_owned()),
    }
}

fn pieces_agree(codec: &Codec, at_once: &Tile, rows: &[f32]) -> Result<(), String> {
    let d = codec.head_dim();
    for pieces in [&[PAGE_TOKENS][..], &[1; PAGE_TOKENS], &[1, 7, 50, 64, 6], &[127, 1]] {
        let mut tile = Tile::new(codec, 0x3c);
        let mut first = 0;
        for &n in pieces {
            tile.append(codec, first, &rows[first * d..(first + n) * d])?;
            first += n;
        }
        let pieces = pieces.len();
        agree(codec, at_once, &tile, &format!("a page appended in {pieces} pieces differs from one encoded at once"))?;
    }
    Ok(())
}

/// Tokens may be taken back: writing goes on at an earlier slot, and those before it stay.
fn earlier_slots_stay(codec: &Codec, rows: &[f32]) -> Result<(), String> {
    let d = codec.head_dim();
    let mut tile = Tile::new(codec, 0);
    tile.append(codec, 0, &rows[..40 * d])?;
    let before = tile.decode(codec, 0, 25)?;
    tile.append(codec, 25, &rows[60 * d..100 * d])?;
    if !same(&before, &tile.decode(codec, 0, 25)?) {
        return Err("slots change when later ones are written again".into());
    }
    Ok(())
}

fn transforms_are_orthonormal(codec: &Codec) -> Result<(), String> {
    let d = codec.head_dim();
    let (a, b) = (normal(d, 77), normal(d, 78));
    let (ra, rb) = (into_domain(codec, a.clone())?, into_domain(codec, b.clone())?);
    let error = relative_error(&a, &out_of_domain(codec, ra.clone())?);
    if error.is_nan() || error > ORTHONORMAL {
        return Err(format!("`transform_output` after `transform_query` leaves a relative error of {error:.1e}"));
    }
    let scale = (dot(&a, &a) * dot(&b, &b)).sqrt();
    let moved = (dot(&a, &b) - dot(&ra, &rb)).abs() / scale;
    match moved <= ORTHONORMAL {
        true => Ok(()),
        false => Err(format!("`transform_query` changes products by {moved:.1e} of |a||b|: it is not orthonormal")),
    }
}

/// Zeros come back as zeros; huge, tiny and infinite values and NaN may come back as anything but an error.
fn odd_values_are_taken(codec: &Codec) -> Result<(), String> {
    let d = codec.head_dim();
    let mut tile = Tile::new(codec, 0x77);
    tile.encode(codec, &vec![0.0; PAGE_TOKENS * d])?;
    if out_of_domain(codec, tile.decode(codec, 0, PAGE_TOKENS)?)?.iter().any(|x| x.abs() > 1e-6 || x.is_nan()) {
        return Err("a page of zeros does not come back as zeros".into());
    }
    for odd in [f32::MAX, f32::MIN_POSITIVE, 1e-42, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65504.0, -65520.0] {
        let mut rows = normal(PAGE_TOKENS * d, 5);
        rows.iter_mut().step_by(3).for_each(|x| *x = odd);
        tile.encode(codec, &rows)?;
        tile.decode(codec, 0, PAGE_TOKENS)?;
    }
    Ok(())
}

fn scores_agree(codec: &Codec, tiles: CpuTilesRef, tile: &Tile) -> Result<(), String> {
    let (d, n_rows) = (codec.head_dim(), 3);
    let queries = normal(n_rows * d, 9);
    let in_domain = into_domain(codec, queries.clone())?;
    let blocks = (n_rows * tiles.query_bytes()).div_ceil(64);
    let mut prepared = vec![Block::filled(0); blocks];
    // SAFETY: `n_rows` rows, and space for as many prepared ones.
    unsafe { tiles.prepare_query(queries.as_ptr(), n_rows, d, prepared.as_mut_ptr().cast()) }
        .map_err(|e| format!("`prepare_query` failed: {}", e.message))?;
    for (first, n) in [(0, PAGE_TOKENS), (0, 1), (5, 30), (127, 1)] {
        let keys = tile.decode(codec, first, n)?;
        let stride = n + 3;
        let mut scores = vec![f32::NAN; n_rows * stride];
        // SAFETY: prepared rows, a whole tile, and space for the scores.
        unsafe {
            let (prepared, bytes) = (prepared.as_ptr().cast(), tile.bytes().as_ptr());
            tiles.score(prepared, n_rows, bytes, first, n, scores.as_mut_ptr(), stride)
        }
        .map_err(|e| format!("`score` failed: {}", e.message))?;
        for (r, query) in in_domain.chunks_exact(d).enumerate() {
            for (t, key) in keys.chunks_exact(d).enumerate() {
                let expected = dot(query, key);
                let scale = (dot(query, query) * dot(key, key)).sqrt().max(1e-9);
                let found = f64::from(scores[r * stride + t]);
                if !within(found, expected, SCORE * scale) {
                    let slot = first + t;
                    return Err(format!(
                        "`score` of slot {slot} is {found}, decoding gives {expected} (|q||k| {scale:.3})"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// False also for NaN.
fn within(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance
}

fn sums_agree(codec: &Codec, tiles: CpuTilesRef, tile: &Tile) -> Result<(), String> {
    let (d, n_rows) = (codec.head_dim(), 3);
    for (first, n) in [(0, PAGE_TOKENS), (0, 1), (5, 30), (127, 1)] {
        let values = tile.decode(codec, first, n)?;
        let stride = n + 3;
        let weights: Vec<f32> = normal(n_rows * stride, 21).iter().map(|x| x.abs()).collect();
        let start = normal(n_rows * d, 22);
        let mut acc = start.clone();
        // SAFETY: weights of `n_rows` rows, a whole tile, and rows of the accumulator.
        unsafe {
            let bytes = tile.bytes().as_ptr();
            tiles.accumulate(weights.as_ptr(), stride, n_rows, bytes, first, n, acc.as_mut_ptr(), d)
        }
        .map_err(|e| format!("`accumulate` failed: {}", e.message))?;
        for r in 0..n_rows {
            let weights = &weights[r * stride..][..n];
            for i in 0..d {
                let terms = || weights.iter().zip(values.chunks_exact(d)).map(|(w, v)| f64::from(*w) * f64::from(v[i]));
                let expected = f64::from(start[r * d + i]) + terms().sum::<f64>();
                let scale = 1.0 + terms().map(f64::abs).sum::<f64>();
                let found = f64::from(acc[r * d + i]);
                if !within(found, expected, ACCUMULATE * scale) {
                    let end = first + n;
                    return Err(format!("`accumulate` of slots {first}..{end} is {found}, decoding gives {expected}"));
                }
            }
        }
    }
    Ok(())
}

fn threads_agree(codec: &Codec, tile: &Tile, rows: &[f32]) -> Result<(), String> {
    let encode = || {
        let mut other = Tile::new(codec, 0);
        other.encode(codec, rows)?;
        agree(codec, tile, &other, "a page encoded while other threads encode differs")
    };
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|_| s.spawn(encode)).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    })
}

fn reopening_agrees(codec: &Codec, again: &Codec, tile: &Tile) -> Result<(), String> {
    if codec.layout() != again.layout() {
        return Err(format!("opened again it has {:?}, expected {:?}", again.layout(), codec.layout()));
    }
    match same(&tile.decode(codec, 0, PAGE_TOKENS)?, &tile.decode(again, 0, PAGE_TOKENS)?) {
        true => Ok(()),
        false => Err("opened again it decodes the same tile otherwise".into()),
    }
}
