//! From a graph to a schedule: which memory each value has, and where workers must meet.
//!
//! **Memory.** A value gets a buffer when it is computed and gives it back after its last use, so a model needs a
//! handful of buffers however many layers it has. An operation never writes a buffer it reads.
//!
//! **Quantised inputs.** Products with integer weights read activations in sixteen bits. Each value that needs it is
//! quantised once, however many products read it.
//!
//! **Barriers.** Workers run the schedule side by side. An operation waits for the others only if it touches memory
//! that an operation since the last barrier touched in conflict, and even then not if both are cut by the same rows:
//! what a worker reads, it wrote itself. So a norm follows a sum without waiting, and Q, K and V run as one.

use super::ExecutorError;
use crate::cpu::matmul::{Precision, quantized_words};
use crate::graph::{Graph, Op, Value, WeightId};

/// Rows a value has in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// One a token.
    Tokens,
    /// One an output.
    Outputs,
    /// So many a token: one for each expert chosen for it. They lie in the order of the experts, not of the tokens.
    TokenExperts(usize),
    /// So many an output.
    OutputExperts(usize),
    /// One an output with logits.
    Logits,
}

impl Rows {
    /// How many in a step, of whose outputs so many have logits.
    pub(super) fn count(self, tokens: usize, outputs: usize, logits: usize) -> usize {
        match self {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
            Rows::TokenExperts(k) => tokens * k,
            Rows::OutputExperts(k) => outputs * k,
            Rows::Logits => logits,
        }
    }

    /// The rows that experts are chosen for.
    fn routed(self) -> Rows {
        match self {
            Rows::TokenExperts(_) => Rows::Tokens,
            Rows::OutputExperts(_) => Rows::Outputs,
            rows => rows,
        }
    }

    /// A row for each of the `k` experts of these.
    fn experts(self, k: usize) -> Rows {
        match self.routed() {
            Rows::Tokens => Rows::TokenExperts(k),
            _ => Rows::OutputExperts(k),
        }
    }
}

/// One unit of the schedule.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Task {
    /// Fills the tables of cosines and sines of every rope.
    Angles,
    /// Quantises a value for the products that follow.
    Quantize(Value),
    /// Sorts the rows of a routing by expert: each worker for itself, in memory of its own.
    Dispatch(Value),
    /// An operation of the graph.
    Op(Op),
}

/// A task, and whether all workers must have finished what came before.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stage {
    pub(super) barrier: bool,
    pub(super) task: Task,
}

/// A buffer's size: `width` f32 for each of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferSize {
    pub(super) rows: Rows,
    pub(super) width: usize,
}

/// What the executor needs to run a graph.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) stages: Vec<Stage>,
    /// Buffer of each value, then of each value's quantised copy; `usize::MAX` where there is none.
    pub(super) buffer_of: Vec<usize>,
    /// Rows of each value.
    pub(super) rows_of: Vec<Rows>,
    pub(super) buffers: Vec<BufferSize>,
}

/// Memory that conflicts can be about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Buffer(usize),
    Layer(u32),
    Angles,
    /// Partial results of attention.
    Partials,
}

/// How workers divide a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// By rows, the same for every task over such rows.
    Rows(Rows),
    /// In its own way.
    Own,
}

/// What a task touches.
struct Touch {
    reads: Vec<Place>,
    writes: Vec<Place>,
    cut: Cut,
}

/// Makes the schedule of `graph`, whose weights are multiplied with `precisions`.
pub(super) fn compile(graph: &Graph, precisions: &[Precision]) -> Result<Schedule, ExecutorError> {
    let rows_of = rows_of_values(graph)?;
    let tasks = Tasks::new(graph, precisions);
    let (buffer_of, buffers) = tasks.assign_buffers(&rows_of);
    let mut pending: Vec<Touch> = Vec::new();
    let mut stages = Vec::new();
    for task in &tasks.list {
        let touch = tasks.touch(task, &buffer_of, &rows_of);
        let barrier = pending.iter().any(|earlier| conflict(earlier, &touch));
        if barrier {
            pending.clear();
        }
        pending.push(touch);
        stages.push(Stage { barrier, task: task.clone() });
    }
    Ok(Schedule { stages, buffer_of, rows_of, buffers })
}

/// The values an operation reads.
pub(in crate::cpu) fn inputs(op: &Op) -> Vec<Value> {
    match *op {
        Op::Embed { .. } | Op::EmbedBy { .. } => vec![],
        Op::RmsNorm { x, .. }
        | Op::LayerNorm { x, .. }
        | Op::Act { x, .. }
        | Op::MatMul { x, .. }
        | Op::Rope { x, .. }
        | Op::Scale { x, .. }
        | Op::SoftCap { x, .. }
        | Op::SelectOutputs { x, .. }
        | Op::SelectLogits { x, .. }
        | Op::Columns { x, .. }
        | Op::L2Norm { x, .. }
        | Op::Decay { x, .. }
        | Op::ShortConv { x, .. } => vec![x],
        Op::Route { logits, .. } => vec![logits],
        Op::Gate { x, gate, .. } => vec![x, gate],
        Op::ExpertMatMul { x, route, .. } | Op::Combine { x, route, .. } => vec![x, route],
        Op::Append { k, v, .. } => vec![k, v],
        Op::Attend { q, .. } => vec![q],
        Op::GatedAct { gate, up, .. } => vec![gate, up],
        Op::Add { a, b, .. } | Op::Mul { a, b, .. } | Op::Concat { a, b, .. } => vec![a, b],
        Op::DeltaNet { q, k, v, decay, beta, .. } => vec![q, k, v, decay, beta],
    }
}

/// The value an operation makes.
pub(in crate::cpu) fn output(op: &Op) -> Option<Value> {
    match *op {
        Op::Append { .. } => None,
        Op::Embed { out, .. }
        | Op::EmbedBy { out, .. }
        | Op::RmsNorm { out, .. }
        | Op::LayerNorm { out, .. }
        | Op::Act { out, .. }
        | Op::MatMul { out, .. }
        | Op::Rope { out, .. }
        | Op::Attend { out, .. }
        | Op::GatedAct { out, .. }
        | Op::Add { out, .. }
        | Op::Scale { out, .. }
        | Op::SoftCap { out, .. }
        | Op::SelectOutputs { out, .. }
        | Op::SelectLogits { out, .. }
        | Op::Columns { out, .. }
        | Op::Concat { out, .. }
        | Op::Mul { out, .. }
        | Op::L2Norm { out, .. }
        | Op::Decay { out, .. }
        | Op::ShortConv { out, .. }
        | Op::DeltaNet { out, .. }
        | Op::Gate { out, .. }
        | Op::Route { out, .. }
        | Op::ExpertMatMul { out, .. }
        | Op::Combine { out, .. } => Some(out),
    }
}

/// What an operation on chosen experts reads, and which routing chose them.
fn routing(op: &Op) -> Option<(Value, Value)> {
    match *op {
        Op::ExpertMatMul { x, route, .. } | Op::Combine { x, route, .. } => Some((x, route)),
        _ => None,
    }
}

/// What a product reads, and its weight.
fn product(op: &Op) -> Option<(Value, WeightId)> {
    match *op {
        Op::MatMul { x, weight, .. } => Some((x, weight)),
        Op::ExpertMatMul { x, experts, .. } => Some((x, experts.stack)),
        _ => None,
    }
}

/// Decides for every value whether it has a row a token or a row an output, and checks that operations agree.
fn rows_of_values(graph: &Graph) -> Result<Vec<Rows>, ExecutorError> {
    let mut rows: Vec<Option<Rows>> = vec![None; graph.widths.len()];
    let fault = |at: usize, what: &str| ExecutorError::Graph(format!("operation {at} ({:?}) {what}", graph.ops[at]));
    for (at, op) in graph.ops.iter().enumerate() {
        let mut found = None;
        for input in inputs(op) {
            let Some(Some(rows)) = rows.get(input.0 as usize).copied() else {
                return Err(fault(at, "reads a value before it is computed"));
            };
            let rows = if routing(op).is_some() { rows.routed() } else { rows };
            if found.is_some_and(|f| f != rows) {
                return Err(fault(at, "mixes rows of tokens with rows of outputs"));
            }
            found = Some(rows);
        }
        let experts = routing(op).map(|(x, route)| (rows[x.0 as usize], graph.width(route) / 2));
        let of_this_routing = |rows: Rows, k| rows == rows.experts(k);
        match (op, experts) {
            (Op::ExpertMatMul { .. }, Some((Some(rows), k))) if rows != rows.routed() && !of_this_routing(rows, k) => {
                return Err(fault(at, "reads rows of another routing"));
            }
            (Op::Combine { .. }, Some((Some(rows), k))) if !of_this_routing(rows, k) => {
                return Err(fault(at, "combines rows that are not its routing's"));
            }
            _ => {}
        }
        let tokens_only = matches!(
            op,
            Op::Rope { .. } | Op::Append { .. } | Op::SelectOutputs { .. } | Op::ShortConv { .. } | Op::DeltaNet { .. }
        );
        if matches!(op, Op::Route { .. } | Op::Attend { .. }) && found.is_some_and(|rows| rows != rows.routed()) {
            return Err(fault(at, "takes no rows of experts"));
        }
        if tokens_only && found != Some(Rows::Tokens) {
            return Err(fault(at, "must come before the output rows are selected"));
        }
        if matches!(op, Op::SelectLogits { .. }) && found != Some(Rows::Outputs) {
            return Err(fault(at, "must come after the output rows are selected"));
        }
        let routed = matches!(op, Op::Attend { .. } | Op::ExpertMatMul { .. });
        if routed && found == Some(Rows::Logits) {
            return Err(fault(at, "must come before the rows with logits are selected"));
        }
        let made = match (op, found.unwrap_or(Rows::Tokens)) {
            (Op::SelectOutputs { .. }, _) => Rows::Outputs,
            (Op::SelectLogits { .. }, _) => Rows::Logits,
            (Op::ExpertMatMul { route, .. }, rows) => rows.experts(graph.width(*route) / 2),
            (_, rows) => rows,
        };
        if let Some(out) = output(op) {
            match rows.get_mut(out.0 as usize) {
                Some(slot @ None) => *slot = Some(made),
                _ => return Err(fault(at, "does not make a new value")),
            }
        }
    }
    let results: [(_, _, &[Rows]); 2] =
        [("hidden state", graph.hidden, &[Rows::Outputs]), ("logits", graph.logits, &[Rows::Outputs, Rows::Logits])];
    for (name, result, allowed) in results {
        if let Some(value) = result
            && !rows.get(value.0 as usize).copied().flatten().is_some_and(|found| allowed.contains(&found))
        {
            return Err(ExecutorError::Graph(format!("the {name} must be computed from selected output rows")));
        }
    }
    Ok(rows.into_iter().map(|r| r.unwrap_or(Rows::Tokens)).collect())
}

/// The tasks of a graph in order, and what they read and make: a value by its number, its quantised copy by that
/// number plus the number of values.
struct Tasks<'a> {
    graph: &'a Graph,
    precisions: &'a [Precision],
    list: Vec<Task>,
}

impl<'a> Tasks<'a> {
    fn new(graph: &'a Graph, precisions: &'a [Precision]) -> Tasks<'a> {
        let mut list = vec![Task::Angles];
        let mut quantized = vec![false; graph.widths.len()];
        let mut dispatched = None;
        for op in &graph.ops {
            if let Some((x, weight)) = product(op)
                && precisions[weight.0 as usize] == Precision::Q16
                && !std::mem::replace(&mut quantized[x.0 as usize], true)
            {
                list.push(Task::Quantize(x));
            }
            if let Some((_, route)) = routing(op)
                && dispatched.replace(route) != Some(route)
            {
                list.push(Task::Dispatch(route));
            }
            list.push(Task::Op(op.clone()));
        }
        Tasks { graph, precisions, list }
    }

    fn copy_of(&self, value: Value) -> usize {
        self.graph.widths.len() + value.0 as usize
    }

    fn reads(&self, task: &Task) -> Vec<usize> {
        match task {
            Task::Angles => vec![],
            Task::Quantize(x) | Task::Dispatch(x) => vec![x.0 as usize],
            // What experts multiply with they know from the dispatch.
            Task::Op(op) => match product(op) {
                Some((x, weight)) if self.precisions[weight.0 as usize] == Precision::Q16 => vec![self.copy_of(x)],
                Some((x, _)) => vec![x.0 as usize],
                None => inputs(op).iter().map(|v| v.0 as usize).collect(),
            },
        }
    }

    fn made(&self, task: &Task) -> Option<usize> {
        match task {
            Task::Angles | Task::Dispatch(_) => None,
            Task::Quantize(x) => Some(self.copy_of(*x)),
            Task::Op(op) => output(op).map(|v| v.0 as usize),
        }
    }

    fn size(&self, datum: usize, rows_of: &[Rows]) -> BufferSize {
        let values = self.graph.widths.len();
        let width = self.graph.widths[datum % values];
        BufferSize { rows: rows_of[datum % values], width: if datum < values { width } else { quantized_words(width) } }
    }

    /// Gives everything that a task makes a buffer that nothing alive at the same time has.
    fn assign_buffers(&self, rows_of: &[Rows]) -> (Vec<usize>, Vec<BufferSize>) {
        let mut last_use = vec![0; 2 * self.graph.widths.len()];
        for (at, task) in self.list.iter().enumerate() {
            for datum in self.reads(task).into_iter().chain(self.made(task)) {
                last_use[datum] = at;
            }
        }
        for result in [self.graph.hidden, self.graph.logits].into_iter().flatten() {
            last_use[result.0 as usize] = self.list.len();
        }
        let mut buffers: Vec<BufferSize> = Vec::new();
        let mut free: Vec<usize> = Vec::new();
        let mut buffer_of = vec![usize::MAX; last_use.len()];
        for (at, task) in self.list.iter().enumerate() {
            if let Some(made) = self.made(task) {
                let size = self.size(made, rows_of);
                let reusable = free.iter().position(|&b| buffers[b] == size);
                buffer_of[made] = reusable.map(|i| free.swap_remove(i)).unwrap_or_else(|| {
                    buffers.push(size);
                    buffers.len() - 1
                });
            }
            let mut touched = self.reads(task);
            touched.extend(self.made(task));
            touched.sort_unstable();
            touched.dedup();
            free.extend(touched.into_iter().filter(|&d| last_use[d] == at).map(|d| buffer_of[d]));
        }
        (buffer_of, buffers)
    }

    fn touch(&self, task: &Task, buffer_of: &[usize], rows_of: &[Rows]) -> Touch {
        let mut reads: Vec<Place> = self.reads(task).into_iter().map(|d| Place::Buffer(buffer_of[d])).collect();
        let mut writes: Vec<Place> = self.made(task).into_iter().map(|d| Place::Buffer(buffer_of[d])).collect();
        let by_rows = |v: Value| Cut::Rows(rows_of[v.0 as usize]);
        let cut = match *task {
            Task::Angles => {
                writes.push(Place::Angles);
                Cut::Rows(Rows::Tokens)
            }
            Task::Quantize(x) => by_rows(x),
            Task::Op(
                Op::Embed { out, .. }
                | Op::EmbedBy { out, .. }
                | Op::RmsNorm { out, .. }
                | Op::LayerNorm { out, .. }
                | Op::Act { out, .. }
                | Op::GatedAct { out, .. }
                | Op::Add { out, .. }
                | Op::Scale { out, .. }
                | Op::Columns { out, .. }
                | Op::Concat { out, .. }
                | Op::Mul { out, .. }
                | Op::L2Norm { out, .. }
                | Op::Decay { out, .. }
                | Op::Gate { out, .. }
                | Op::Route { out, .. }
                | Op::Combine { out, .. },
            ) => by_rows(out),
            Task::Op(Op::Rope { out, .. }) => {
                reads.push(Place::Angles);
                by_rows(out)
            }
            Task::Op(Op::Append { layer, .. }) => {
                writes.push(Place::Layer(layer.0));
                Cut::Own
            }
            Task::Op(Op::Attend { layer, .. }) => {
                reads.extend([Place::Layer(layer.0), Place::Angles]);
                writes.push(Place::Partials);
                Cut::Own
            }
            // Planes that a step reads are not those that it writes, so recurrent layers wait for nothing but their inputs.
            Task::Dispatch(_)
            | Task::Op(
                Op::MatMul { .. }
                | Op::ExpertMatMul { .. }
                | Op::SoftCap { .. }
                | Op::SelectOutputs { .. }
                | Op::SelectLogits { .. }
                | Op::ShortConv { .. }
                | Op::DeltaNet { .. },
            ) => Cut::Own,
        };
        Touch { reads, writes, cut }
    }
}

/// Whether `later` may only start when all workers have finished `earlier`.
fn conflict(earlier: &Touch, later: &Touch) -> bool {
    if earlier.cut == later.cut && earlier.cut != Cut::Own {
        return false;
    }
    let meet = |a: &[Place], b: &[Place]| a.iter().any(|p| b.contains(p));
    meet(&earlier.writes, &later.reads) || meet(&earlier.reads, &later.writes) || meet(&earlier.writes, &later.writes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Activation, GraphBuilder, KvGeometry};

    /// A model of `layers` feed-forward and attention layers without ropes.
    fn model(layers: usize) -> Graph {
        let mut b = GraphBuilder::new();
        let table = b.weight("token_embd.weight", 64, 100);
        let mut x = b.embed(table, 1.0);
        for l in 0..layers {
            let mut weight = |name: &str, cols, rows| b.weight(format!("blk.{l}.{name}"), cols, rows);
            let (norm, q, k) = (weight("norm", 64, 1), weight("q", 64, 64), weight("k", 64, 32));
            let (v, o) = (weight("v", 64, 32), weight("o", 64, 64));
            let (gate, up, down) = (weight("gate", 64, 96), weight("up", 64, 96), weight("down", 96, 64));
            let layer = b.kv_layer(KvGeometry { n_kv_heads: 1, k_head_dim: 32, v_head_dim: 32, window: None });
            let a = b.rms_norm(x, norm, 1e-5);
            let (q, k, v) = (b.matmul(a, q), b.matmul(a, k), b.matmul(a, v));
            b.append(layer, k, v);
            let a = b.attend(q, layer, None, 1.0, None);
            let a = b.matmul(a, o);
            x = b.add(x, a);
            let f = b.rms_norm(x, norm, 1e-5);
            let (g, u) = (b.matmul(f, gate), b.matmul(f, up));
            let g = b.gated_act(g, u, Activation::Silu);
            let f = b.matmul(g, down);
            x = b.add(x, f);
        }
        let x = b.select_outputs(x);
        let logits = b.matmul(x, table);
        b.finish(x, logits)
    }

    fn compiled(graph: &Graph, precision: Precision) -> Schedule {
        compile(graph, &vec![precision; graph.weights.len()]).unwrap()
    }

    #[test]
    fn memory_does_not_grow_with_layers() {
        for precision in [Precision::Float, Precision::Q16] {
            let few = compiled(&model(2), precision).buffers.len();
            assert_eq!(compiled(&model(9), precision).buffers.len(), few);
        }
    }

    #[test]
    fn values_alive_at_the_same_time_have_buffers_of_their_own() {
        for precision in [Precision::Float, Precision::Q16] {
            let graph = model(2);
            let precisions = vec![precision; graph.weights.len()];
            let tasks = Tasks::new(&graph, &precisions);
            let schedule = compile(&graph, &precisions).unwrap();
            let mut holder = vec![None; schedule.buffers.len()];
            for task in &tasks.list {
                let reads = tasks.reads(task);
                for &input in &reads {
                    assert_eq!(holder[schedule.buffer_of[input]], Some(input), "{task:?} reads its own input");
                }
                if let Some(out) = tasks.made(task) {
                    assert!(reads.iter().all(|&i| schedule.buffer_of[i] != schedule.buffer_of[out]), "{task:?}");
                    holder[schedule.buffer_of[out]] = Some(out);
                }
            }
            for result in [graph.hidden.unwrap(), graph.logits.unwrap()] {
                let result = result.0 as usize;
                assert_eq!(holder[schedule.buffer_of[result]], Some(result), "results survive");
            }
        }
    }

    #[test]
    fn products_that_share_an_input_share_its_quantised_copy() {
        let schedule = compiled(&model(1), Precision::Q16);
        let copies = schedule.stages.iter().filter(|s| matches!(s.task, Task::Quantize(_))).count();
        assert_eq!(copies, 5, "q, k and v; output; gate and up; down; logits");
    }

    #[test]
    fn independent_products_run_as_one_and_row_work_follows_without_waiting() {
        let schedule = compiled(&model(1), Precision::Float);
        let waits: Vec<(bool, &str)> = schedule
            .stages
            .iter()
            .map(|s| {
                let name = match &s.task {
                    Task::Angles => "angles",
                    Task::Op(Op::Embed { .. }) => "embed",
                    Task::Op(Op::RmsNorm { .. }) => "norm",
                    Task::Op(Op::MatMul { .. }) => "matmul",
                    Task::Op(Op::Append { .. }) => "append",
                    Task::Op(Op::Attend { .. }) => "attend",
                    Task::Op(Op::GatedAct { .. }) => "act",
                    Task::Op(Op::Add { .. }) => "add",
                    Task::Op(Op::SelectOutputs { .. }) => "select",
                    Task::Quantize(_) | Task::Dispatch(_) | Task::Op(_) => "other",
                };
                (s.barrier, name)
            })
            .collect();
        let (go, wait) = (false, true);
        let expected = [
            (go, "angles"),
            (go, "embed"),
            (go, "norm"),
            (wait, "matmul"),
            (go, "matmul"),
            (go, "matmul"),
            (wait, "append"),
            (wait, "attend"),
            (wait, "matmul"),
            (wait, "add"),
            (go, "norm"),
            (wait, "matmul"),
            (go, "matmul"),
            (wait, "act"),
            (wait, "matmul"),
            (wait, "add"),
            (wait, "select"),
            (wait, "matmul"),
        ];
        assert_eq!(waits, expected);
    }

    #[test]
    fn workers_meet_between_two_attentions_that_do_not_need_each_other() {
        let mut b = GraphBuilder::new();
        let table = b.weight("token_embd.weight", 64, 100);
        let x = b.embed(table, 1.0);
        let geometry = KvGeometry { n_kv_heads: 1, k_head_dim: 64, v_head_dim: 64, window: None };
        let layers = [b.kv_layer(geometry), b.kv_layer(geometry)];
        let [first, second] = layers.map(|layer| b.attend(x, layer, None, 1.0, None));
        let sum = b.add(first, second);
        let out = b.select_outputs(sum);
        let schedule = compile(&b.finish(out, out), &[Precision::Float]).unwrap();
        let attends = schedule.stages.iter().filter(|s| matches!(s.task, Task::Op(Op::Attend { .. })));
        assert!(attends.map(|s| s.barrier).eq([true, true]));
    }

    #[test]
    fn a_graph_that_mixes_tokens_and_outputs_is_refused() {
        let mut b = GraphBuilder::new();
        let table = b.weight("token_embd.weight", 64, 100);
        let x = b.embed(table, 1.0);
        let selected = b.select_outputs(x);
        let sum = b.add(x, selected);
        let error = compile(&b.finish(sum, sum), &[Precision::Float]).unwrap_err().to_string();
        assert!(error.contains("mixes rows of tokens with rows of outputs"), "{error}");
    }
}
