//! Mistakes that ports of these architectures really had, each made on purpose: the tiny models must show every one of them. A
//! family adds its rows in a file of its own.

mod dense;
mod experts;
mod gemma4;
mod hybrid;

use opencoti_compute::graph::{Graph, Op};
use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::hparams::HParams;

use crate::reference::Mistakes;
use crate::{Fixture, TOLERANCE, fixture, max_diff, reference};

/// A mistake and the tiny models that show it.
pub(crate) struct Mistake {
    /// What is wrong.
    what: &'static str,
    /// Models whose logits must show it.
    models: &'static [&'static str],
    /// How it is made.
    change: Change,
}

/// Where a mistake is made.
pub(crate) enum Change {
    /// In the hyperparameters, before the graph is built.
    HParams(fn(&mut HParams)),
    /// In the graph.
    Graph(fn(&mut Graph)),
    /// In what the interpreter makes of the graph.
    Interpreter(fn(&mut Mistakes)),
}

/// Every family's rows.
const TABLE: &[&[Mistake]] = &[dense::ROWS, experts::ROWS, gemma4::ROWS, hybrid::ROWS];

/// How far logits must be off: well above what rounding explains.
const SEEN: f32 = 3.0 * TOLERANCE;

#[test]
fn every_mistake_is_seen() {
    let mut missed = Vec::new();
    for mistake in TABLE.iter().copied().flatten() {
        for name in mistake.models {
            let diff = diff_with(&fixture(name), &mistake.change);
            println!("{}, {name}: {diff}", mistake.what);
            if !(diff.is_finite() && diff > SEEN) {
                missed.push(format!("{}, {name}: {diff}", mistake.what));
            }
        }
    }
    assert!(missed.is_empty(), "not seen: {missed:#?}");
}

fn diff_with(fixture: &Fixture, change: &Change) -> f32 {
    let mut model = fixture.model.clone();
    let mut mistakes = Mistakes::default();
    match change {
        Change::HParams(change) => model = rebuilt(&model, change),
        Change::Graph(change) => change(&mut model.graph),
        Change::Interpreter(change) => change(&mut mistakes),
    }
    let logits = reference::logits_with_mistakes(&model.graph, &model.weights, &fixture.tokens, mistakes);
    max_diff(&logits, &fixture.logits)
}

/// The model that other hyperparameters give.
pub(crate) fn rebuilt(model: &Model, change: impl Fn(&mut HParams)) -> Model {
    let mut hparams = model.hparams.clone();
    change(&mut hparams);
    let arch = Architecture::of(&model.file).expect("known");
    Model::build(model.file.clone(), arch, hparams).expect("builds")
}

/// Turns operations into the identity.
pub(crate) fn skip(graph: &mut Graph, which: impl Fn(&Graph, &Op) -> bool) {
    for i in 0..graph.ops.len() {
        if which(graph, &graph.ops[i]) {
            let (out, x) = match graph.ops[i] {
                Op::RmsNorm { out, x, .. } | Op::Scale { out, x, .. } | Op::SoftCap { out, x, .. } => (out, x),
                ref other => panic!("cannot be skipped: {other:?}"),
            };
            graph.ops[i] = Op::Scale { out, x, factor: 1.0 };
        }
    }
}

/// Whether an operation is the norm of this name in some block.
pub(crate) fn is_norm(graph: &Graph, op: &Op, name: &str) -> bool {
    let Op::RmsNorm { weight: Some(weight), .. } = op else { return false };
    graph.weights[weight.0 as usize].name.split('.').nth(2) == Some(name)
}

/// Confuses the two inputs of gated feed-forwards.
pub(crate) fn swap_gate_and_up(g: &mut Graph) {
    for op in &mut g.ops {
        if let Op::GatedAct { gate, up, .. } = op {
            std::mem::swap(gate, up);
        }
    }
}
