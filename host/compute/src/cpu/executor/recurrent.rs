//! Recurrent layers of a step.

use std::ops::Range;

use super::run::Run;
use crate::cpu::pool::Worker;
use crate::cpu::recurrent::{DeltaNet, DeltaShape, Planes, Scratch, ShortConv, delta_net, short_conv};
use crate::graph::{DeltaInputs, HeadMap, StateGeometry, StateLayerId, Value, WeightId};

// Safety is that of `run.rs`: a task's inputs are written by nobody, and the schedule gives its output no buffer that it reads.
impl Run<'_> {
    pub(super) fn short_conv(&self, worker: Worker<'_>, out: Value, x: Value, weight: WeightId, layer: StateLayerId) {
        let conv = ShortConv {
            // SAFETY: nobody writes `x`, see above.
            x: unsafe { self.rows(x, &(0..self.count(x))) },
            taps: &self.vectors[weight.0 as usize],
            channels: self.graph.width(x),
            out: self.pointer(out),
        };
        let Some(planes) = self.planes(layer, |g| 0..g.conv) else { return };
        // SAFETY: the executor checked the step; only this call's workers touch `out` and the layer's new planes.
        unsafe { short_conv(self.isa, worker, &self.step.state_runs, planes, &conv) };
    }

    pub(super) fn delta_net(
        &self,
        worker: Worker<'_>,
        out: Value,
        inputs: DeltaInputs,
        layer: StateLayerId,
        (map, scale): (HeadMap, f32),
        scratch: &mut Scratch,
    ) {
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        let (keys, values, v_heads) = (self.graph.width(k), self.graph.width(v), self.graph.width(decay));
        let k_dim = self.graph.state_layers[layer.0 as usize].recurrent / values;
        // SAFETY: nobody writes the inputs, see above.
        let rows = |value: Value| unsafe { self.rows(value, &(0..self.count(value))) };
        let net = DeltaNet {
            shape: DeltaShape { k_heads: keys / k_dim, v_heads, k_dim, v_dim: values / v_heads, map },
            q: rows(q),
            k: rows(k),
            v: rows(v),
            decay: rows(decay),
            beta: rows(beta),
            scale,
            out: self.pointer(out),
        };
        let Some(planes) = self.planes(layer, |g| g.conv..g.conv + g.recurrent) else { return };
        // SAFETY: the executor checked the step; only this call's workers touch `out` and the layer's new planes.
        unsafe { delta_net(self.isa, worker, &self.step.state_runs, planes, &net, scratch) };
    }

    /// Part of a layer's memory in the step's planes, which a checked step of a graph with such layers has.
    fn planes(&self, layer: StateLayerId, part: impl Fn(StateGeometry) -> Range<usize>) -> Option<Planes<'_>> {
        let words = part(self.graph.state_layers[layer.0 as usize]);
        let offset = self.graph.state_offset(layer) + words.start;
        self.step.states.as_ref().map(|view| Planes::new(view, offset, words.len()))
    }
}
