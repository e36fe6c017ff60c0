//! Attention over a plan the obvious way: one worker, every page decoded for every row, f64 sums. What the executor's own
//! kernels are held against.

use opencoti_compute::cpu::executor::{Attend, AttentionKernels, LayerStep};
use opencoti_compute::cpu::pool::Worker;
use opencoti_compute::plan::{PageSpan, Segment, StoreView, TileSide};

pub(crate) struct PlainAttention;

/// Scores and values that one query head sees.
type Seen = Vec<(f64, Vec<f32>)>;

impl AttentionKernels for PlainAttention {
    unsafe fn append(&self, worker: Worker<'_>, at: LayerStep<'_>, k: &[f32], v: &[f32]) -> Result<(), String> {
        if worker.index() != 0 {
            return Ok(());
        }
        let g = at.geometry;
        for run in &at.step.groups[at.group].appends {
            let store = &at.step.stores[run.store as usize];
            let tiles = &store.layers[at.layer];
            let n = run.rows.len();
            for head in 0..g.n_kv_heads {
                for (side, values, dim) in [(&tiles.k, k, g.k_head_dim), (&tiles.v, v, g.v_head_dim)] {
                    let stride = g.n_kv_heads * dim;
                    let rows = &values[run.rows.start as usize * stride + head * dim..];
                    assert!(rows.len() >= (n - 1) * stride + dim);
                    // SAFETY: the step was checked; this worker alone writes; `rows` holds `n` rows, `stride` apart.
                    unsafe {
                        let tile = store.tile(side, run.page, head);
                        side.codec.append(tile, run.first_slot as usize, n, rows.as_ptr(), stride)
                    }
                    .map_err(|e| e.to_string())?;
                }
            }
        }
        Ok(())
    }

    unsafe fn attend(&self, worker: Worker<'_>, at: LayerStep<'_>, attend: &Attend<'_>) -> Result<(), String> {
        if worker.index() != 0 {
            return Ok(());
        }
        let g = at.geometry;
        let segments = &at.step.groups[at.group].segments;
        for row in 0..at.step.tokens.len() {
            for head in 0..attend.n_heads {
                let mut seen = Seen::new();
                for segment in segments.iter().filter(|s| s.queries.iter().any(|q| q.contains(&(row as u32)))) {
                    see(&at, attend, segment, row, head, &mut seen)?;
                }
                let place = (row * attend.n_heads + head) * g.v_head_dim;
                // SAFETY: `out` has a row for each of the step's, and this worker alone touches it.
                let out = unsafe { std::slice::from_raw_parts_mut(attend.out.add(place), g.v_head_dim) };
                mix(&seen, out);
            }
        }
        Ok(())
    }
}

/// Adds what a head of a row sees in a segment.
fn see(
    at: &LayerStep<'_>,
    attend: &Attend<'_>,
    segment: &Segment,
    row: usize,
    head: usize,
    seen: &mut Seen,
) -> Result<(), String> {
    let g = at.geometry;
    let own = at.step.positions[row];
    let mut q = attend.q[(row * attend.n_heads + head) * g.k_head_dim..][..g.k_head_dim].to_vec();
    if let Some(rope) = attend.rope {
        let mut table = vec![0.0; rope.n_rot()];
        rope.angles(segment.rotation.position(own), &mut table);
        rope.rotate(&table, &mut q);
    }
    let kv_head = head / (attend.n_heads / g.n_kv_heads);
    let store = &at.step.stores[segment.store as usize];
    let tiles = &store.layers[at.layer];
    let visible = segment.mask.visible(own);
    for span in segment.pages.head(kv_head) {
        let keys = decode(store, &tiles.k, span, kv_head, g.k_head_dim)?;
        let values = decode(store, &tiles.v, span, kv_head, g.v_head_dim)?;
        for slot in (0..span.len).filter(|slot| visible.contains(&(span.start_pos + slot))) {
            let key = &keys[slot as usize * g.k_head_dim..][..g.k_head_dim];
            let dot: f64 = q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let score = dot * f64::from(attend.scale);
            let score = attend.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            seen.push((score, values[slot as usize * g.v_head_dim..][..g.v_head_dim].to_vec()));
        }
    }
    Ok(())
}

fn decode(store: &StoreView, side: &TileSide, span: &PageSpan, head: usize, dim: usize) -> Result<Vec<f32>, String> {
    assert!(!side.codec.is_rotated());
    let mut rows = vec![0.0; span.len as usize * dim];
    // SAFETY: the step was checked, so the page exists and its slots were written; `rows` has space for them.
    unsafe {
        let tile = store.tile(side, span.page, head);
        side.codec.decode_page(tile, 0, span.len as usize, rows.as_mut_ptr(), dim)
    }
    .map_err(|e| e.to_string())?;
    Ok(rows)
}

/// Softmax over the scores, mixed over the values.
fn mix(seen: &Seen, out: &mut [f32]) {
    let max = seen.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = seen.iter().map(|s| (s.0 - max).exp()).sum();
    for (i, out) in out.iter_mut().enumerate() {
        *out = seen.iter().map(|(score, value)| (score - max).exp() / sum * f64::from(value[i])).sum::<f64>() as f32;
    }
}
