//! One worker's walk through a schedule.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::compile::{Rows, Schedule, Task};
use super::experts::ExpertScratch;
use super::{Attend, AttentionKernels, LayerStep, QueryRows};
use crate::cpu::matmul::{GRAIN, Operand, Output, Packed, Precision, Scratch, precision, quantize_activations};
use crate::cpu::pool::Worker;
use crate::cpu::recurrent;
use crate::cpu::rope::Rotary;
use crate::cpu::simd::Isa;
use crate::cpu::vecmath;
use crate::graph::{Activation, DeltaInputs, Graph, KvLayerId, Op, RopeId, RowIndex, Value, WeightId};
use crate::plan::Step;
use crate::weights::Weight;

/// Buffers as workers see them: who may touch which part when is the schedule's promise.
pub(super) struct Memory(Vec<(*mut f32, usize)>);

// SAFETY: `range` hands out parts under the promise of its callers that no other worker touches them in conflict.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// The memory of `buffers`, which stays borrowed by the run that this belongs to.
    pub(super) fn of(buffers: &mut [Vec<f32>]) -> Memory {
        Memory(buffers.iter_mut().map(|b| (b.as_mut_ptr(), b.len())).collect())
    }

    /// Elements of buffer `index` to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(super) unsafe fn range(&self, index: usize, range: Range<usize>) -> &[f32] {
        let (data, len) = self.0[index];
        assert!(range.start <= range.end && range.end <= len);
        // SAFETY: inside the buffer; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(data.add(range.start), range.len()) }
    }

    /// Elements of buffer `index` to write.
    ///
    /// # Safety
    /// Nobody else touches them while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the schedule, not the borrow checker, keeps workers apart")]
    pub(super) unsafe fn range_mut(&self, index: usize, range: Range<usize>) -> &mut [f32] {
        let (data, len) = self.0[index];
        assert!(range.start <= range.end && range.end <= len);
        // SAFETY: inside the buffer; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(data.add(range.start), range.len()) }
    }
}

/// What a worker needs for itself.
#[derive(Default)]
pub(super) struct Local {
    pub(super) scratch: Scratch,
    pub(super) experts: ExpertScratch,
    pub(super) delta: recurrent::Scratch,
}

/// Everything a step's workers share.
pub(super) struct Run<'a> {
    pub(super) graph: &'a Graph,
    pub(super) schedule: &'a Schedule,
    pub(super) weights: &'a [Weight],
    pub(super) packed: &'a [Option<Packed>],
    pub(super) vectors: &'a [Vec<f32>],
    pub(super) ropes: &'a [Rotary],
    pub(super) layers: &'a [(usize, usize)],
    pub(super) attention: &'a dyn AttentionKernels,
    pub(super) locals: &'a [Mutex<Local>],
    pub(super) isa: Isa,
    pub(super) step: &'a Step,
    pub(super) buffers: Memory,
    pub(super) angles: Memory,
    /// The first failure of attention.
    pub(super) failure: Mutex<Option<String>>,
}

// A note on safety for the functions below. The schedule places a barrier before any task that touches memory in
// conflict with an earlier one unless both are cut by the same rows, and never gives a task's output a buffer that it
// reads. So within a task, a worker is alone with the rows (or columns) that it takes as its share, and what it reads
// nobody writes.
impl Run<'_> {
    /// Walks the schedule as one worker.
    pub(super) fn work(&self, worker: Worker<'_>) {
        let mut local = self.locals[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
        for stage in &self.schedule.stages {
            if stage.barrier {
                worker.barrier();
            }
            match &stage.task {
                Task::Angles => self.fill_angles(worker),
                Task::Quantize(x) => self.quantize(*x, worker),
                Task::Dispatch(route) => self.dispatch(*route, &mut local.experts.dispatch),
                Task::Op(op) => self.execute(op, worker, &mut local),
            }
        }
    }

    fn execute(&self, op: &Op, worker: Worker<'_>, local: &mut Local) {
        match *op {
            Op::Embed { out, table, scale } => self.embed(worker, out, table, scale),
            Op::EmbedBy { out, table, index } => self.embed_by(worker, out, table, index),
            Op::RmsNorm { out, x, weight, eps, group } => self.rms_norm(worker, out, x, weight, eps, group),
            Op::LayerNorm { out, x, weight, bias, eps } => self.layer_norm(worker, out, x, weight, bias, eps),
            Op::MatMul { out, x, weight, bias } => self.matmul(worker, out, x, weight, bias, &mut local.scratch),
            Op::Rope { out, x, head_dim, rope } => self.rope(worker, out, x, head_dim, rope),
            Op::Append { layer, k, v } => self.append(worker, layer, k, v),
            Op::Attend { out, q, layer, rope, scale, softcap } => {
                self.attend(worker, out, q, layer, rope, scale, softcap)
            }
            Op::GatedAct { out, gate, up, act } => self.gated_act(worker, out, gate, up, act),
            Op::Act { out, x, act } => {
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
                vecmath::activate(self.isa, act, x, out);
            }
            Op::Add { out, a, b } => {
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (a, b, out) = unsafe { (self.rows(a, &rows), self.rows(b, &rows), self.rows_mut(out, &rows)) };
                vecmath::add(self.isa, a, b, out);
            }
            Op::Scale { out, x, factor } => {
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
                vecmath::scale(self.isa, x, factor, out);
            }
            Op::Gate { out, x, gate } => {
                for row in self.share(worker, out) {
                    let one = row..row + 1;
                    // SAFETY: this worker's rows, see above.
                    let (x, gate, out) =
                        unsafe { (self.rows(x, &one), self.rows(gate, &one), self.rows_mut(out, &one)) };
                    vecmath::gate(self.isa, x, gate, out);
                }
            }
            Op::Route { out, logits, renorm } => self.route(worker, out, logits, renorm),
            Op::ExpertMatMul { out, x, experts, .. } => self.expert_matmul(worker, out, x, experts, local),
            Op::Combine { out, x, route } => self.combine(worker, out, x, route, &local.experts.dispatch),
            Op::SoftCap { out, x, cap } => {
                // Logits are wide and often a single row, so the work is cut by elements.
                let elements = worker.share(self.count(out) * self.graph.width(out), 64);
                // SAFETY: this worker's elements, see above.
                let (x, out) = unsafe {
                    (
                        self.buffers.range(self.buffer(x), elements.clone()),
                        self.buffers.range_mut(self.buffer(out), elements),
                    )
                };
                vecmath::soft_cap(self.isa, x, cap, out);
            }
            Op::SelectOutputs { out, x } => self.select(worker, out, x, &self.step.outputs),
            Op::SelectLogits { out, x } => self.select(worker, out, x, &self.step.logits),
            Op::Columns { out, x, group, start } => {
                let width = self.graph.width(out) / (self.graph.width(x) / group);
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
                for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(width)) {
                    out.copy_from_slice(&x[start..start + width]);
                }
            }
            Op::Concat { out, a, b } => {
                let (first, second) = (self.graph.width(a), self.graph.width(b));
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (a, b, out) = unsafe { (self.rows(a, &rows), self.rows(b, &rows), self.rows_mut(out, &rows)) };
                let parts = a.chunks_exact(first).zip(b.chunks_exact(second));
                for ((a, b), out) in parts.zip(out.chunks_exact_mut(first + second)) {
                    out[..first].copy_from_slice(a);
                    out[first..].copy_from_slice(b);
                }
            }
            Op::Mul { out, a, b } => {
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (a, b, out) = unsafe { (self.rows(a, &rows), self.rows(b, &rows), self.rows_mut(out, &rows)) };
                vecmath::mul(self.isa, a, b, out);
            }
            Op::L2Norm { out, x, eps, group } => {
                let rows = self.share(worker, out);
                // SAFETY: this worker's rows, see above.
                let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
                for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)) {
                    vecmath::l2_norm(self.isa, x, eps, out);
                }
            }
            Op::Decay { out, x, bias, rate } => self.decay(worker, out, x, bias, rate),
            Op::ShortConv { out, x, weight, layer } => self.short_conv(worker, out, x, weight, layer),
            Op::DeltaNet { out, q, k, v, decay, beta, layer, map, scale } => {
                let inputs = DeltaInputs { q, k, v, decay, beta };
                self.delta_net(worker, out, inputs, layer, (map, scale), &mut local.delta)
            }
        }
    }

    fn decay(&self, worker: Worker<'_>, out: Value, x: Value, bias: WeightId, rate: WeightId) {
        let [bias, rate] = [bias, rate].map(|w| self.vectors[w.0 as usize].as_slice());
        let rows = self.share(worker, out);
        // SAFETY: this worker's rows, see above.
        let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
        for (x, out) in x.chunks_exact(bias.len()).zip(out.chunks_exact_mut(bias.len())) {
            vecmath::decay(self.isa, x, bias, rate, out);
        }
    }

    fn embed(&self, worker: Worker<'_>, out: Value, table: WeightId, scale: f32) {
        let table = self.weights[table.0 as usize].matrix();
        for row in self.share(worker, out) {
            // SAFETY: this worker's rows, see above.
            let values = unsafe { self.rows_mut(out, &(row..row + 1)) };
            table.dequantize_row(self.step.tokens[row] as usize, values);
            if scale != 1.0 {
                values.iter_mut().for_each(|v| *v *= scale);
            }
        }
    }

    fn embed_by(&self, worker: Worker<'_>, out: Value, table: WeightId, index: RowIndex) {
        let table = self.weights[table.0 as usize].matrix();
        for row in self.share(worker, out) {
            // SAFETY: this worker's rows, see above.
            let values = unsafe { self.rows_mut(out, &(row..row + 1)) };
            table.dequantize_row(self.step.index(index, row) as usize, values);
        }
    }

    /// Copies the rows of `x` that `chosen` lists.
    fn select(&self, worker: Worker<'_>, out: Value, x: Value, chosen: &[u32]) {
        for to in self.share(worker, out) {
            let from = chosen[to] as usize;
            // SAFETY: this worker's rows of `out`; nobody writes `x`, see above.
            let (x, out) = unsafe { (self.rows(x, &(from..from + 1)), self.rows_mut(out, &(to..to + 1))) };
            out.copy_from_slice(x);
        }
    }

    fn layer_norm(&self, worker: Worker<'_>, out: Value, x: Value, weight: WeightId, bias: WeightId, eps: f32) {
        let (weight, bias) = (&self.vectors[weight.0 as usize], &self.vectors[bias.0 as usize]);
        let rows = self.share(worker, out);
        // SAFETY: this worker's rows, see above.
        let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
        for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            vecmath::layer_norm(self.isa, x, weight, bias, eps, out);
        }
    }

    fn rms_norm(&self, worker: Worker<'_>, out: Value, x: Value, weight: Option<WeightId>, eps: f32, group: usize) {
        let weight = weight.map(|w| self.vectors[w.0 as usize].as_slice());
        let rows = self.share(worker, out);
        // SAFETY: this worker's rows, see above.
        let (x, out) = unsafe { (self.rows(x, &rows), self.rows_mut(out, &rows)) };
        for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)) {
            vecmath::rms_norm(self.isa, x, weight, eps, out);
        }
    }

    fn matmul(
        &self,
        worker: Worker<'_>,
        out: Value,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        scratch: &mut Scratch,
    ) {
        let w = &self.weights[weight.0 as usize];
        let bias = bias.map(|b| self.vectors[b.0 as usize].as_slice());
        let all = 0..self.count(out);
        let columns = worker.share(w.rows(), GRAIN);
        // SAFETY: nobody writes `x` or its copy; this worker alone touches its columns of `out`, see above.
        unsafe {
            let out = Output::shared(self.pointer(out), all.len(), w.rows(), bias);
            let x = match precision(w.ty()) {
                Precision::Float => self.rows(x, &all),
                Precision::Q16 => {
                    let (copy, words) = self.copy(x);
                    self.buffers.range(copy, 0..all.len() * words)
                }
            };
            self.operand(weight).multiply(self.isa, x, columns, 0, out, scratch);
        }
    }

    /// A weight as products take it.
    pub(super) fn operand(&self, weight: WeightId) -> Operand<'_> {
        match &self.packed[weight.0 as usize] {
            Some(packed) => Operand::Packed(packed),
            None => Operand::Plain(self.weights[weight.0 as usize].matrix()),
        }
    }

    fn quantize(&self, x: Value, worker: Worker<'_>) {
        let (copy, words) = self.copy(x);
        for row in self.share(worker, x) {
            // SAFETY: this worker's rows of the value and of its copy, see above.
            let (x, copy) = unsafe {
                (self.rows(x, &(row..row + 1)), self.buffers.range_mut(copy, row * words..(row + 1) * words))
            };
            quantize_activations(self.isa, x, copy);
        }
    }

    fn fill_angles(&self, worker: Worker<'_>) {
        let rows = worker.share(self.step.positions.len(), 1);
        for (i, rope) in self.ropes.iter().enumerate() {
            for row in rows.clone() {
                // SAFETY: this worker's rows, see above.
                let table = unsafe { self.angles.range_mut(i, row * rope.n_rot()..(row + 1) * rope.n_rot()) };
                rope.angles(self.step.positions[row], table);
            }
        }
    }

    fn rope(&self, worker: Worker<'_>, out: Value, x: Value, head_dim: usize, rope: RopeId) {
        let (index, rope) = (rope.0 as usize, &self.ropes[rope.0 as usize]);
        for row in self.share(worker, out) {
            let one = row..row + 1;
            // SAFETY: this worker's rows of values and angles, see above.
            let (x, out) = unsafe { (self.rows(x, &one), self.rows_mut(out, &one)) };
            // SAFETY: as above.
            let table = unsafe { self.angles.range(index, row * rope.n_rot()..(row + 1) * rope.n_rot()) };
            out.copy_from_slice(x);
            for head in out.chunks_exact_mut(head_dim) {
                rope.rotate(table, head);
            }
        }
    }

    fn gated_act(&self, worker: Worker<'_>, out: Value, gate: Value, up: Value, act: Activation) {
        let rows = self.share(worker, out);
        // SAFETY: this worker's rows, see above.
        let (gate, up, out) = unsafe { (self.rows(gate, &rows), self.rows(up, &rows), self.rows_mut(out, &rows)) };
        match act {
            Activation::Silu => vecmath::gated_silu(self.isa, gate, up, out),
            Activation::GeluTanh => vecmath::gated_gelu(self.isa, gate, up, out),
            Activation::GeluErf | Activation::Tanh | Activation::Sigmoid => {
                vecmath::activate(self.isa, act, gate, out);
                vecmath::multiply(self.isa, up, out);
            }
        }
    }

    fn append(&self, worker: Worker<'_>, layer: KvLayerId, k: Value, v: Value) {
        let all = 0..self.count(k);
        // SAFETY: nobody writes `k` and `v`; the executor checked the step before the run.
        let done = unsafe { self.attention.append(worker, self.layer(layer), self.rows(k, &all), self.rows(v, &all)) };
        self.keep_failure(done);
    }

    fn attend(
        &self,
        worker: Worker<'_>,
        out: Value,
        q: Value,
        layer: KvLayerId,
        rope: Option<RopeId>,
        scale: f32,
        softcap: Option<f32>,
    ) {
        let at = self.layer(layer);
        let attend = Attend {
            rows: match self.schedule.rows_of[q.0 as usize] {
                Rows::Outputs => QueryRows::outputs(self.step),
                // Rows of experts do not attend, nor do those with logits.
                _ => QueryRows::all(self.step),
            },
            // SAFETY: nobody writes `q`, see above.
            q: unsafe { self.rows(q, &(0..self.count(q))) },
            n_heads: self.graph.width(q) / at.geometry.k_head_dim,
            rope: rope.map(|r| &self.ropes[r.0 as usize]),
            angles: rope.map_or(&[], |r| {
                let (index, n_rot) = (r.0 as usize, self.ropes[r.0 as usize].n_rot());
                // SAFETY: filled before the barrier that precedes attention.
                unsafe { self.angles.range(index, 0..self.step.positions.len() * n_rot) }
            }),
            scale,
            softcap,
            out: self.pointer(out),
        };
        // SAFETY: the executor checked the step; only this call's workers touch `out`, see above.
        let done = unsafe { self.attention.attend(worker, at, &attend) };
        self.keep_failure(done);
    }

    fn keep_failure(&self, done: Result<(), String>) {
        if let Err(message) = done {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
        }
    }

    fn layer(&self, layer: KvLayerId) -> LayerStep<'_> {
        let (group, place) = self.layers[layer.0 as usize];
        let geometry = self.graph.kv_layers[layer.0 as usize];
        LayerStep { isa: self.isa, step: self.step, group, layer: place, geometry }
    }

    /// Rows that `value` has in this step.
    pub(super) fn count(&self, value: Value) -> usize {
        self.rows_of(value).count(self.step.tokens.len(), self.step.outputs.len(), self.step.logits.len())
    }

    pub(super) fn rows_of(&self, value: Value) -> Rows {
        self.schedule.rows_of[value.0 as usize]
    }

    /// The rows of `value` that are this worker's.
    pub(super) fn share(&self, worker: Worker<'_>, value: Value) -> Range<usize> {
        worker.share(self.count(value), 1)
    }

    /// Buffer of a value's quantised copy, and the words of a row.
    pub(super) fn copy(&self, value: Value) -> (usize, usize) {
        let buffer = self.schedule.buffer_of[self.graph.widths.len() + value.0 as usize];
        (buffer, self.schedule.buffers[buffer].width)
    }

    pub(super) fn buffer(&self, value: Value) -> usize {
        self.schedule.buffer_of[value.0 as usize]
    }

    pub(super) fn pointer(&self, value: Value) -> *mut f32 {
        self.buffers.0[self.buffer(value)].0
    }

    /// # Safety
    /// See [`Memory::range`].
    pub(super) unsafe fn rows(&self, value: Value, rows: &Range<usize>) -> &[f32] {
        let width = self.graph.width(value);
        // SAFETY: the caller's promise.
        unsafe { self.buffers.range(self.buffer(value), rows.start * width..rows.end * width) }
    }

    /// # Safety
    /// See [`Memory::range_mut`].
    #[allow(clippy::mut_from_ref, reason = "the schedule, not the borrow checker, keeps workers apart")]
    pub(super) unsafe fn rows_mut(&self, value: Value, rows: &Range<usize>) -> &mut [f32] {
        let width = self.graph.width(value);
        // SAFETY: the caller's promise.
        unsafe { self.buffers.range_mut(self.buffer(value), rows.start * width..rows.end * width) }
    }
}
