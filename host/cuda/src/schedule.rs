//! From a graph to a list of launches: what is fused, and which memory each value has.
//!
//! Products read inputs that were prepared (f16, in the order of the tensor cores); a norm or a gated activation before a product
//! writes them so at once, and a sum behind a product is done by it. A value that nobody reads in f32 is never written in f32.

use opencoti_compute::graph::{Activation, Graph, KvLayerId, Op, RopeId, Value, WeightId};

use crate::CudaError;

/// Rows that a value has in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) enum Rows {
    /// One a token.
    Tokens,
    /// One an output.
    Outputs,
    /// One an output with logits.
    Logits,
}

/// What a function of elements does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Element {
    Add,
    Mul,
    Scale(f32),
    SoftCap(f32),
    Act(Activation),
    GatedAct(Activation),
}

/// A product of a prepared input.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Product {
    pub(crate) out: Value,
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    /// What is added.
    pub(crate) residual: Option<Value>,
}

/// One launch, or a few that belong together. `prepared` results are inputs of products.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Task {
    Embed { out: Value, table: WeightId, scale: f32 },
    Prepare { x: Value },
    GatedPrepare { of: Value, gate: Value, up: Value, act: Activation },
    NormRows { out: Value, x: Value, weight: Option<WeightId>, eps: f32, plain: bool, prepared: bool },
    NormGroups { out: Value, x: Value, weight: Option<WeightId>, eps: f32, group: usize },
    Products { x: Value, of: Vec<Product> },
    Rope { out: Value, x: Value, head_dim: usize, rope: RopeId },
    Append { layer: KvLayerId, k: Value, v: Value },
    Attend { out: Value, q: Value, layer: KvLayerId, rope: Option<RopeId>, scale: f32, softcap: Option<f32> },
    Elements { out: Value, a: Value, b: Option<Value>, what: Element },
    Gate { out: Value, x: Value, gate: Value },
    Select { out: Value, x: Value },
    Columns { out: Value, x: Value, group: usize, start: usize },
    Concat { out: Value, a: Value, b: Value },
}

/// A datum: a value in f32, or its prepared copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Datum {
    Plain(Value),
    Prepared(Value),
}

/// A buffer's size: bytes of each of its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BufferSize {
    pub(crate) rows: Rows,
    pub(crate) row_bytes: usize,
}

/// What the executor runs.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) tasks: Vec<Task>,
    /// Rows of each value.
    pub(crate) rows_of: Vec<Rows>,
    /// Buffer of each value, then of each prepared copy; `usize::MAX` for none.
    pub(crate) buffer_of: Vec<usize>,
    pub(crate) buffers: Vec<BufferSize>,
    /// Whether attention works on output rows, by layer.
    pub(crate) selects_logits: bool,
}

/// Columns of a prepared row of `width` values: whole units of every format.
pub(crate) fn prepared_width(width: usize) -> usize {
    width.next_multiple_of(64)
}

/// Bytes of a prepared row: halves, and a factor behind all rows.
fn prepared_bytes(width: usize) -> usize {
    prepared_width(width) * 2 + 4
}

/// Makes the schedule of a graph.
///
/// # Errors
/// With the name of an operation that these kernels do not have.
pub(crate) fn compile(graph: &Graph) -> Result<Schedule, CudaError> {
    if graph.bidirectional {
        return Err(CudaError::Unsupported("encoders do not run on the CUDA executor".to_owned()));
    }
    let rows_of = rows_of_values(graph)?;
    let tasks = fuse(graph)?;
    let selects_logits = graph.ops.iter().any(|op| matches!(op, Op::SelectLogits { .. }));
    let (buffer_of, buffers) = assign_buffers(graph, &tasks, &rows_of);
    Ok(Schedule { tasks, rows_of, buffer_of, buffers, selects_logits })
}

/// Inputs and output of an operation that these kernels have.
fn values(op: &Op) -> Result<(Vec<Value>, Option<Value>), CudaError> {
    Ok(match *op {
        Op::Embed { out, .. } => (vec![], Some(out)),
        Op::RmsNorm { out, x, .. }
        | Op::MatMul { out, x, .. }
        | Op::Rope { out, x, .. }
        | Op::Act { out, x, .. }
        | Op::Scale { out, x, .. }
        | Op::SoftCap { out, x, .. }
        | Op::SelectOutputs { out, x }
        | Op::SelectLogits { out, x }
        | Op::Columns { out, x, .. } => (vec![x], Some(out)),
        Op::Append { k, v, .. } => (vec![k, v], None),
        Op::Attend { out, q, .. } => (vec![q], Some(out)),
        Op::GatedAct { out, gate, up, .. } => (vec![gate, up], Some(out)),
        Op::Add { out, a, b } | Op::Mul { out, a, b } | Op::Concat { out, a, b } => (vec![a, b], Some(out)),
        Op::Gate { out, x, gate } => (vec![x, gate], Some(out)),
        ref other => {
            let debug = format!("{other:?}");
            let name = debug.split([' ', '{']).next().unwrap_or_default().to_owned();
            return Err(CudaError::Unsupported(format!(
                "the model needs operation {name}, for which there are no CUDA kernels"
            )));
        }
    })
}

fn rows_of_values(graph: &Graph) -> Result<Vec<Rows>, CudaError> {
    let wrong = |op: &Op, what: &str| CudaError::Wrong(format!("the model's graph cannot run: {op:?} {what}"));
    let mut rows: Vec<Option<Rows>> = vec![None; graph.widths.len()];
    for op in &graph.ops {
        let (inputs, out) = values(op)?;
        let mut found = None;
        for input in inputs {
            let Some(Some(r)) = rows.get(input.0 as usize).copied() else {
                return Err(wrong(op, "reads a value before it is computed"));
            };
            if found.is_some_and(|f| f != r) {
                return Err(wrong(op, "mixes rows of tokens with rows of outputs"));
            }
            found = Some(r);
        }
        let made = match op {
            Op::SelectOutputs { .. } => Rows::Outputs,
            Op::SelectLogits { .. } => Rows::Logits,
            _ => found.unwrap_or(Rows::Tokens),
        };
        let tokens_only = matches!(op, Op::Rope { .. } | Op::Append { .. } | Op::SelectOutputs { .. });
        if tokens_only && found != Some(Rows::Tokens) || matches!(op, Op::Attend { .. }) && made == Rows::Logits {
            return Err(wrong(op, "comes behind the selection of rows"));
        }
        if let Some(out) = out {
            match rows.get_mut(out.0 as usize) {
                Some(slot @ None) => *slot = Some(made),
                _ => return Err(wrong(op, "does not make a new value")),
            }
        }
    }
    for result in [graph.hidden, graph.logits].into_iter().flatten() {
        if matches!(rows.get(result.0 as usize), None | Some(None | Some(Rows::Tokens))) {
            return Err(CudaError::Wrong("the model's results must be computed from selected output rows".to_owned()));
        }
    }
    Ok(rows.into_iter().map(|r| r.unwrap_or(Rows::Tokens)).collect())
}

/// Who reads a value.
struct Uses {
    /// Operations that read it, by place; a result of the graph is read by nobody's place.
    plain: Vec<usize>,
    /// Products among its readers.
    products: usize,
}

fn uses(graph: &Graph) -> Result<Vec<Uses>, CudaError> {
    let mut uses: Vec<Uses> = graph.widths.iter().map(|_| Uses { plain: vec![], products: 0 }).collect();
    for (at, op) in graph.ops.iter().enumerate() {
        for input in values(op)?.0 {
            match op {
                Op::MatMul { .. } => uses[input.0 as usize].products += 1,
                _ => uses[input.0 as usize].plain.push(at),
            }
        }
    }
    for result in [graph.hidden, graph.logits].into_iter().flatten() {
        uses[result.0 as usize].plain.push(usize::MAX);
    }
    Ok(uses)
}

fn fuse(graph: &Graph) -> Result<Vec<Task>, CudaError> {
    let uses = uses(graph)?;
    let of = |v: Value| &uses[v.0 as usize];
    let mut made_at = vec![usize::MAX; graph.widths.len()];
    for (at, op) in graph.ops.iter().enumerate() {
        if let Some(out) = values(op)?.1 {
            made_at[out.0 as usize] = at;
        }
    }
    // The sum that a product does for the one operation that reads it.
    let sum_behind = |at: usize, out: Value| match of(out) {
        Uses { plain, products: 0 } if plain.len() == 1 && plain[0] != usize::MAX => match graph.ops[plain[0]] {
            Op::Add { out: sum, a, b } if a != b => {
                let other = if a == out { b } else { a };
                (made_at[other.0 as usize] < at).then_some((plain[0], sum, other))
            }
            _ => None,
        },
        _ => None,
    };
    let mut prepared = vec![false; graph.widths.len()];
    let mut done = vec![false; graph.ops.len()];
    let mut tasks = Vec::new();
    for (at, op) in graph.ops.iter().enumerate() {
        if done[at] {
            continue;
        }
        let task = match *op {
            Op::Embed { out, table, scale } => Task::Embed { out, table, scale },
            Op::RmsNorm { out, x, weight, eps, group } if group == graph.width(x) => {
                let product = of(out).products > 0;
                prepared[out.0 as usize] = product;
                Task::NormRows { out, x, weight, eps, plain: !of(out).plain.is_empty(), prepared: product }
            }
            Op::RmsNorm { out, x, weight, eps, group } => Task::NormGroups { out, x, weight, eps, group },
            Op::MatMul { out, x, weight, bias } => {
                if !std::mem::replace(&mut prepared[x.0 as usize], true) {
                    tasks.push(Task::Prepare { x });
                }
                let product = match sum_behind(at, out) {
                    Some((sum_at, sum, other)) => {
                        done[sum_at] = true;
                        Product { out: sum, weight, bias, residual: Some(other) }
                    }
                    None => Product { out, weight, bias, residual: None },
                };
                // Products of one input that follow each other are one task, if none adds the result of another.
                if let Some(Task::Products { x: same, of }) = tasks.last_mut()
                    && *same == x
                    && of.iter().all(|p| Some(p.out) != product.residual)
                {
                    of.push(product);
                    continue;
                }
                Task::Products { x, of: vec![product] }
            }
            Op::GatedAct { out, gate, up, act } if of(out).plain.is_empty() => {
                prepared[out.0 as usize] = true;
                Task::GatedPrepare { of: out, gate, up, act }
            }
            Op::GatedAct { out, gate, up, act } => {
                Task::Elements { out, a: gate, b: Some(up), what: Element::GatedAct(act) }
            }
            Op::Rope { out, x, head_dim, rope } => Task::Rope { out, x, head_dim, rope },
            Op::Append { layer, k, v } => Task::Append { layer, k, v },
            Op::Attend { out, q, layer, rope, scale, softcap } => Task::Attend { out, q, layer, rope, scale, softcap },
            Op::Act { out, x, act } => Task::Elements { out, a: x, b: None, what: Element::Act(act) },
            Op::Add { out, a, b } => Task::Elements { out, a, b: Some(b), what: Element::Add },
            Op::Mul { out, a, b } => Task::Elements { out, a, b: Some(b), what: Element::Mul },
            Op::Scale { out, x, factor } => Task::Elements { out, a: x, b: None, what: Element::Scale(factor) },
            Op::SoftCap { out, x, cap } => Task::Elements { out, a: x, b: None, what: Element::SoftCap(cap) },
            Op::SelectOutputs { out, x } | Op::SelectLogits { out, x } => Task::Select { out, x },
            Op::Columns { out, x, group, start } => Task::Columns { out, x, group, start },
            Op::Concat { out, a, b } => Task::Concat { out, a, b },
            Op::Gate { out, x, gate } => Task::Gate { out, x, gate },
            ref other => return Err(CudaError::Internal(format!("{other:?} passed as supported"))),
        };
        tasks.push(task);
    }
    Ok(tasks)
}

/// What a task reads and makes.
fn data(task: &Task) -> (Vec<Datum>, Vec<Datum>) {
    use Datum::{Plain, Prepared};
    match *task {
        Task::Embed { out, .. } => (vec![], vec![Plain(out)]),
        Task::Prepare { x } => (vec![Plain(x)], vec![Prepared(x)]),
        Task::GatedPrepare { of, gate, up, .. } => (vec![Plain(gate), Plain(up)], vec![Prepared(of)]),
        Task::NormRows { out, x, plain, prepared, .. } => {
            let both = [(plain, Plain(out)), (prepared, Prepared(out))];
            (vec![Plain(x)], both.into_iter().filter_map(|(made, datum)| made.then_some(datum)).collect())
        }
        Task::Products { x, ref of } => {
            let residuals = of.iter().filter_map(|p| p.residual).map(Plain);
            (std::iter::once(Prepared(x)).chain(residuals).collect(), of.iter().map(|p| Plain(p.out)).collect())
        }
        Task::Append { k, v, .. } => (vec![Plain(k), Plain(v)], vec![]),
        Task::NormGroups { out, x, .. }
        | Task::Rope { out, x, .. }
        | Task::Attend { out, q: x, .. }
        | Task::Select { out, x }
        | Task::Columns { out, x, .. } => (vec![Plain(x)], vec![Plain(out)]),
        Task::Elements { out, a, b, .. } => (std::iter::once(a).chain(b).map(Plain).collect(), vec![Plain(out)]),
        Task::Gate { out, x, gate } => (vec![Plain(x), Plain(gate)], vec![Plain(out)]),
        Task::Concat { out, a, b } => (vec![Plain(a), Plain(b)], vec![Plain(out)]),
    }
}

/// Gives everything a buffer that nothing alive at the same time has.
fn assign_buffers(graph: &Graph, tasks: &[Task], rows_of: &[Rows]) -> (Vec<usize>, Vec<BufferSize>) {
    let n = graph.widths.len();
    let index = |datum: &Datum| match *datum {
        Datum::Plain(v) => v.0 as usize,
        Datum::Prepared(v) => n + v.0 as usize,
    };
    let mut last_use = vec![0; 2 * n];
    for (at, task) in tasks.iter().enumerate() {
        let (reads, makes) = data(task);
        reads.iter().chain(&makes).for_each(|d| last_use[index(d)] = at);
    }
    for result in [graph.hidden, graph.logits].into_iter().flatten() {
        last_use[result.0 as usize] = tasks.len();
    }
    let mut buffers: Vec<BufferSize> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    let mut buffer_of = vec![usize::MAX; 2 * n];
    for (at, task) in tasks.iter().enumerate() {
        let (reads, makes) = data(task);
        for d in makes.iter().map(index) {
            let width = graph.widths[d % n];
            let row_bytes = if d < n { width * 4 } else { prepared_bytes(width) };
            let size = BufferSize { rows: rows_of[d % n], row_bytes };
            buffer_of[d] = match free.iter().position(|&b| buffers[b] == size) {
                Some(i) => free.swap_remove(i),
                None => {
                    buffers.push(size);
                    buffers.len() - 1
                }
            };
        }
        let mut touched: Vec<usize> = reads.iter().chain(&makes).map(index).collect();
        touched.sort_unstable();
        touched.dedup();
        free.extend(touched.into_iter().filter(|&d| last_use[d] == at).map(|d| buffer_of[d]));
    }
    (buffer_of, buffers)
}

#[cfg(test)]
mod tests {
    use opencoti_compute::graph::GraphBuilder;

    use super::*;

    #[test]
    fn a_norm_prepares_what_products_read_and_a_product_adds_what_stands_behind_it() {
        let mut b = GraphBuilder::new();
        let (table, norm, w) = (b.weight("t", 64, 8), b.vector("n", 64), b.weight("w", 64, 64));
        let x = b.embed(table, 1.0);
        let n = b.rms_norm(x, norm, 1e-5);
        let y = b.matmul(n, w);
        let x = b.add(x, y);
        let out = b.select_outputs(x);
        let logits = b.matmul(out, table);
        let schedule = compile(&b.finish(out, logits)).unwrap();
        let names: Vec<String> =
            schedule.tasks.iter().map(|t| format!("{t:?}").split(' ').next().unwrap().to_owned()).collect();
        assert_eq!(names, ["Embed", "NormRows", "Products", "Select", "Prepare", "Products"]);
        assert!(matches!(schedule.tasks[1], Task::NormRows { plain: false, prepared: true, .. }));
        assert!(matches!(&schedule.tasks[2], Task::Products { of, .. } if of[0].residual == Some(Value(0))));
    }

    #[test]
    fn products_of_one_input_are_one_task() {
        let mut b = GraphBuilder::new();
        let (table, w) = (b.weight("t", 64, 8), ["q", "k", "v"].map(|name| b.weight(name, 64, 64)));
        let x = b.embed(table, 1.0);
        let [q, k, v] = w.map(|w| b.matmul(x, w));
        let y = b.mul(q, k);
        let y = b.mul(y, v);
        let out = b.select_outputs(y);
        let schedule = compile(&b.finish(out, out)).unwrap();
        assert!(matches!(&schedule.tasks[2], Task::Products { of, .. } if of.len() == 3), "{:?}", schedule.tasks);
    }

    #[test]
    fn an_operation_without_kernels_is_refused_by_name() {
        let mut b = GraphBuilder::new();
        let (table, norm) = (b.weight("t", 64, 8), b.vector("n", 64));
        let x = b.embed(table, 1.0);
        let x = b.layer_norm(x, norm, norm, 1e-5);
        let out = b.select_outputs(x);
        let error = compile(&b.finish(out, out)).unwrap_err().to_string();
        assert!(error.contains("operation LayerNorm") && error.contains("--device cpu"), "{error}");
    }

    #[test]
    fn values_alive_at_the_same_time_have_buffers_of_their_own() {
        let mut b = GraphBuilder::new();
        let (table, w) = (b.weight("t", 64, 8), b.weight("w", 64, 64));
        let x = b.embed(table, 1.0);
        let y = b.matmul(x, w);
        let z = b.matmul(x, w);
        let sum = b.mul(y, z);
        let out = b.select_outputs(sum);
        let schedule = compile(&b.finish(out, out)).unwrap();
        let buffers = [y, z, sum].map(|v| schedule.buffer_of[v.0 as usize]);
        assert!(buffers[0] != buffers[1] && buffers[2] != buffers[0] && buffers[2] != buffers[1]);
    }
}
