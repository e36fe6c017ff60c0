//! The oracle: for every row and head, all keys that its segments show, one softmax, in f64.

use opencoti_compute::graph::RopePairing;
use opencoti_compute::plan::{Mask, QueryRotation, Segment, StoreView, TileSide};

use crate::cases::{Case, LAYER, SCALAR};

/// A result, and the sum of the magnitudes it is made of.
#[derive(Clone, Copy)]
pub(crate) struct Exact {
    pub(crate) value: f64,
    pub(crate) magnitude: f64,
}

/// Rows of a tile in the plain basis.
pub(crate) fn stored(store: &StoreView, side: &TileSide, page: u32, head: usize, n: usize) -> Vec<f64> {
    let d = side.codec.head_dim();
    let mut rows = vec![0f32; n * d];
    // SAFETY: the page and head exist and the first `n` slots were written.
    unsafe { side.codec.decode_page(store.tile(side, page, head), 0, n, rows.as_mut_ptr(), d).unwrap() };
    let of_scalar = SCALAR.contains(&side.codec.name());
    if !of_scalar {
        // A rotation that only the codec knows; the kit of conformance checks it. It rounds in f32.
        // SAFETY: whole rows.
        unsafe { side.codec.transform_output(rows.as_mut_ptr(), n, d).unwrap() };
    }
    let mut rows: Vec<f64> = rows.into_iter().map(f64::from).collect();
    if of_scalar && side.codec.is_rotated() {
        let block = 1 << d.trailing_zeros();
        rows.chunks_mut(block).for_each(hadamard);
    }
    if let Some(channels) = &side.channels {
        // A sum of one row with weight 1 is that row.
        for row in rows.chunks_exact_mut(d) {
            let mut plain: Vec<f32> = row.iter().map(|&v| v as f32).collect();
            channels.output(head, 1.0, &mut plain);
            row.iter_mut().zip(plain).for_each(|(to, v)| *to = f64::from(v));
        }
    }
    rows
}

/// Orthonormal Walsh–Hadamard transform by halves.
fn hadamard(v: &mut [f64]) {
    if v.len() > 1 {
        let (a, b) = v.split_at_mut(v.len() / 2);
        hadamard(a);
        hadamard(b);
        for (a, b) in a.iter_mut().zip(b) {
            (*a, *b) = ((*a + *b) / 2f64.sqrt(), (*a - *b) / 2f64.sqrt());
        }
    }
}

fn sees(mask: Mask, query: u32, key: u32) -> bool {
    match mask {
        Mask::Causal => key <= query,
        Mask::Full => true,
        Mask::Window(w) => key <= query && query - key < w,
    }
}

fn query(case: &Case, row: usize, head: usize, segment: &Segment) -> Vec<f64> {
    let d = case.geometry.k_head_dim;
    let mut q: Vec<f64> = case.q[(row * case.n_heads + head) * d..][..d].iter().map(|&v| f64::from(v)).collect();
    let Some(rope) = &case.rope else { return q };
    let own = case.step.positions[row];
    let position = match segment.rotation {
        QueryRotation::Own => own,
        QueryRotation::Offset(by) => (i64::from(own) + i64::from(by)).max(0) as u32,
        QueryRotation::At(position) => position,
    };
    let pairs = rope.frequencies().len();
    for (i, f) in rope.frequencies().iter().enumerate() {
        let (a, b) = match case.pairing {
            RopePairing::Norm => (2 * i, 2 * i + 1),
            RopePairing::Neox => (i, i + pairs),
        };
        let (sin, cos) = (f64::from(position) * f).sin_cos();
        (q[a], q[b]) = (q[a] * cos - q[b] * sin, q[a] * sin + q[b] * cos);
    }
    q
}

/// A page that a segment reads: positions of its keys, keys and values.
struct Page {
    segment: usize,
    kv_head: usize,
    start: u32,
    k: Vec<f64>,
    v: Vec<f64>,
}

fn pages(case: &Case) -> Vec<Page> {
    let mut out = Vec::new();
    for (segment, s) in case.step.groups[0].segments.iter().enumerate() {
        let store = &case.step.stores[s.store as usize];
        let tiles = &store.layers[LAYER];
        for kv_head in 0..case.geometry.n_kv_heads {
            for span in s.pages.head(kv_head) {
                let n = span.len as usize;
                let k = stored(store, &tiles.k, span.page, kv_head, n);
                let v = stored(store, &tiles.v, span.page, kv_head, n);
                out.push(Page { segment, kv_head, start: span.start_pos, k, v });
            }
        }
    }
    out
}

/// The result of a case: `rows x n_heads x v_head_dim`.
pub(crate) fn attention(case: &Case) -> Vec<Exact> {
    let pages = pages(case);
    let heads = case.n_heads / case.geometry.n_kv_heads;
    let units = (0..case.step.positions.len()).flat_map(|row| (0..case.n_heads).map(move |head| (row, head)));
    units.flat_map(|(row, head)| row_attention(case, &pages, row, head, head / heads)).collect()
}

fn row_attention(case: &Case, pages: &[Page], row: usize, head: usize, kv_head: usize) -> Vec<Exact> {
    let (dk, dv) = (case.geometry.k_head_dim, case.geometry.v_head_dim);
    let mut keys: Vec<(f64, &[f64])> = Vec::new();
    for page in pages.iter().filter(|p| p.kv_head == kv_head) {
        let segment = &case.step.groups[0].segments[page.segment];
        if !segment.queries.iter().any(|r| r.contains(&(row as u32))) {
            continue;
        }
        let q = query(case, row, head, segment);
        for (t, (k, v)) in page.k.chunks(dk).zip(page.v.chunks(dv)).enumerate() {
            if sees(segment.mask, case.step.positions[row], page.start + t as u32) {
                let s = f64::from(case.scale) * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
                keys.push((case.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh()), v));
            }
        }
    }
    let max = keys.iter().map(|(s, _)| *s).fold(f64::NEG_INFINITY, f64::max);
    assert!(keys.is_empty() || max < 60.0, "the tolerance assumes smaller scores than {max}");
    let sum: f64 = keys.iter().map(|(s, _)| (s - max).exp()).sum();
    let mut out = vec![Exact { value: 0.0, magnitude: 0.0 }; dv];
    for (s, v) in keys {
        let weight = (s - max).exp() / sum;
        for (o, v) in out.iter_mut().zip(v) {
            o.value += weight * v;
            o.magnitude += (weight * v).abs();
        }
    }
    out
}
