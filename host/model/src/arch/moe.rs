//! Feed-forwards of experts, of which a router chooses a few for each token.

use std::ops::Range;

use opencoti_compute::graph::{Activation, Experts, Value};

use super::builder::{ArchBuilder, scalar};
use crate::error::ModelError;
use crate::hparams::HParams;

/// The experts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moe {
    /// Experts there are.
    pub(super) experts: usize,
    /// Experts that a token gets.
    pub(super) used: usize,
    /// Width of an expert's feed-forward.
    pub(super) width: usize,
    /// Its activation.
    pub(super) act: Activation,
    /// Whether the weights of a token's experts are made to sum to one.
    pub(super) renorm: bool,
}

impl Moe {
    /// The experts that the hyperparameters tell of, with weights that sum to one.
    pub(super) fn of(hp: &HParams, l: usize, act: Activation) -> Moe {
        Moe {
            experts: hp.expert_count,
            used: hp.expert_used_count,
            width: hp.expert_feed_forward.unwrap_or(hp.layers[l].feed_forward),
            act,
            renorm: true,
        }
    }
}

impl ArchBuilder<'_> {
    /// The weighted sum of the experts of block `l` over `x`, chosen by the router's product with `router_input`:
    /// `ffn_gate_inp`, `ffn_gate_exps` and `ffn_up_exps` or both in `ffn_gate_up_exps` (gate rows first), `ffn_down_exps`;
    /// a `.scale` beside a stack multiplies each expert's products.
    pub(super) fn moe_ffn(
        &mut self,
        l: usize,
        router_input: Value,
        x: Value,
        embedding: usize,
        moe: Moe,
    ) -> Result<Value, ModelError> {
        let Moe { experts, used, width, act, renorm } = moe;
        let router = self.matrix(&format!("blk.{l}.ffn_gate_inp.weight"), embedding, experts)?;
        let logits = self.graph.matmul(router_input, router);
        let route = self.graph.route(logits, used, renorm);
        let fused = format!("blk.{l}.ffn_gate_up_exps");
        let (gate, up) = match self.has(&format!("{fused}.weight")) {
            true => {
                let both = Stack { prefix: &fused, cols: embedding, rows: 2 * width, experts };
                (self.expert_linear(both, 0..width, x, route)?, self.expert_linear(both, width..2 * width, x, route)?)
            }
            false => {
                let [gate, up] = ["gate", "up"].map(|name| format!("blk.{l}.ffn_{name}_exps"));
                let stack = |prefix| Stack { prefix, cols: embedding, rows: width, experts };
                (
                    self.expert_linear(stack(&gate), 0..width, x, route)?,
                    self.expert_linear(stack(&up), 0..width, x, route)?,
                )
            }
        };
        let gated = self.graph.gated_act(gate, up, act);
        let down = format!("blk.{l}.ffn_down_exps");
        let down = Stack { prefix: &down, cols: width, rows: embedding, experts };
        let products = self.expert_linear(down, 0..embedding, gated, route)?;
        Ok(self.graph.combine(products, route))
    }

    /// `sigmoid(gate x) * ffn(x)` of the expert of block `l` that serves every token: `ffn_gate_shexp`, `ffn_up_shexp`,
    /// `ffn_down_shexp`, and `ffn_gate_inp_shexp` for the gate.
    pub(super) fn shared_expert(
        &mut self,
        l: usize,
        x: Value,
        embedding: usize,
        width: usize,
        act: Activation,
    ) -> Result<Value, ModelError> {
        let y = self.gated_ffn_named(l, "_shexp", x, embedding, width, act)?;
        let gate = self.matrix(&format!("blk.{l}.ffn_gate_inp_shexp.weight"), embedding, 1)?;
        let gate = self.graph.matmul(x, gate);
        Ok(self.graph.gate(y, gate))
    }

    /// Products with some rows of each expert of a stack.
    fn expert_linear(
        &mut self,
        stack: Stack<'_>,
        rows: Range<usize>,
        x: Value,
        route: Value,
    ) -> Result<Value, ModelError> {
        let Stack { prefix, cols, rows: all, experts } = stack;
        let weight = self.expert_stack(&format!("{prefix}.weight"), cols, all, experts)?;
        let factors = format!("{prefix}.scale");
        let one_each = self.elements(&factors) == Some(experts);
        let scale = if one_each { Some(self.vector(&factors, experts)?) } else { None };
        let part = Experts { stack: weight, first: rows.start, rows: rows.len(), scale };
        let product = self.graph.expert_matmul(x, route, part);
        match self.has(&factors) && !one_each {
            true => Ok(self.graph.scale(product, scalar(self.file, &factors)?)),
            false => Ok(product),
        }
    }
}

/// A stack of experts in the file, `rows` rows of `cols` elements each.
#[derive(Clone, Copy)]
struct Stack<'a> {
    prefix: &'a str,
    cols: usize,
    rows: usize,
    experts: usize,
}
