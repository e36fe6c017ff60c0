//! The launches of a step, task by task.

use opencoti_compute::graph::{Activation, KvLayerId, RopeId, Value, WeightId};

use super::block::{GroupSizes, Sizes};
use super::{Executor, count};
use crate::CudaError;
use crate::driver::{Args, Kernel};
use crate::kernels::{AttentionShape, Counts, Prepared, Product, Products, Queries, Results};
use crate::schedule::{self, Element, Task, prepared_width};
use crate::weights::Matrix;

/// Threads of a block of simple kernels.
const BLOCK: u32 = 256;
/// Threads of a block that works on a whole row: many where there are few rows.
fn row_block(rows: usize) -> u32 {
    if rows <= 64 { 1024 } else { 256 }
}
/// Input rows up to which a product reads its weights at memory speed, a row tile a block.
const FEW_INPUTS: usize = 16;

/// Number of an activation function in rows.cu.
fn activation(act: Activation) -> u32 {
    match act {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Tanh => 3,
        Activation::Sigmoid => 4,
    }
}

/// Number of a function of elements in rows.cu, its factor and its activation.
fn element(what: Element) -> (u32, f32, u32) {
    match what {
        Element::Add => (0, 0.0, 0),
        Element::Mul => (1, 0.0, 0),
        Element::Scale(f) => (2, f, 0),
        Element::SoftCap(f) => (3, f, 0),
        Element::Act(act) => (4, 0.0, activation(act)),
        Element::GatedAct(act) => (5, 0.0, activation(act)),
    }
}

fn blocks(size: usize) -> [u32; 3] {
    [size.div_ceil(BLOCK as usize).clamp(1, u32::MAX as usize) as u32, 1, 1]
}

impl Executor {
    /// Queues everything of a step.
    ///
    /// # Safety
    /// The block on the card was filled for these sizes, and the step was checked.
    pub(super) unsafe fn enqueue(&self, sizes: &Sizes) -> Result<(), CudaError> {
        for rope in &self.ropes {
            let args = Args::new()
                .with(self.block.at(sizes.positions_at))
                .with(rope.frequencies.at())
                .with((rope.n_rot / 2) as u32)
                .with(rope.magnitude)
                .with(rope.table.at());
            // SAFETY: positions and table have a row for each of these.
            unsafe { self.gpu.launch(&self.rows.angles, [sizes.angles as u32, 1, 1], 64, args) }?;
        }
        // SAFETY: buffers have the rows of any step that was checked; arguments are those of the kernels.
        self.schedule.tasks.iter().try_for_each(|task| unsafe { self.task(sizes, task) })
    }

    fn rows_of(&self, sizes: &Sizes, value: Value) -> usize {
        count(self.schedule.rows_of[value.0 as usize], sizes.tokens, sizes.outputs, sizes.logits)
    }

    fn plain(&self, value: Value) -> u64 {
        self.buffers[self.schedule.buffer_of[value.0 as usize]].at()
    }

    fn prepared(&self, value: Value) -> Prepared {
        let buffer = self.schedule.buffer_of[self.graph.widths.len() + value.0 as usize];
        let (memory, size) = (&self.buffers[buffer], self.schedule.buffers[buffer]);
        let stride = prepared_width(self.graph.width(value));
        let rows = memory.len() / size.row_bytes;
        let scale = memory.at() + (rows * stride * 2) as u64;
        Prepared { halves: memory.at(), scale, stride: stride as u32, padding: 0 }
    }

    fn vector(&self, weight: Option<WeightId>) -> u64 {
        weight.map_or(0, |w| self.weights.vectors[&w.0])
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn task(&self, sizes: &Sizes, task: &Task) -> Result<(), CudaError> {
        let rows = |value| self.rows_of(sizes, value);
        let width = |value| self.graph.width(value);
        let size = |value| rows(value) * width(value);
        let launch = |kernel: &Kernel, grid: [u32; 3], block: u32, args: Args| match grid[0] {
            0 => Ok(()),
            // SAFETY: the caller's promise.
            _ => unsafe { self.gpu.launch(kernel, grid, block, args) },
        };
        match *task {
            Task::Embed { out, table, scale } => {
                let matrix = &self.weights.matrices[&table.0];
                let args = Args::new()
                    .with(matrix.at)
                    .with(matrix.cols as u32)
                    .with(self.block.at(sizes.tokens_at))
                    .with(scale)
                    .with(self.plain(out));
                launch(&self.weights.kernels[&matrix.format.ty].embed, [rows(out) as u32, 1, 1], BLOCK, args)
            }
            Task::Prepare { x } => {
                let args = Args::new().with(self.plain(x)).with(width(x) as u32).with(self.prepared(x));
                launch(&self.rows.prepare, [rows(x) as u32, 1, 1], row_block(rows(x)), args)
            }
            Task::GatedPrepare { of, gate, up, act } => {
                let args = Args::new()
                    .with(self.plain(gate))
                    .with(self.plain(up))
                    .with(activation(act))
                    .with(width(of) as u32)
                    .with(self.prepared(of));
                launch(&self.rows.gated_prepare, [rows(of) as u32, 1, 1], row_block(rows(of)), args)
            }
            Task::NormRows { out, x, weight, eps, plain, prepared } => {
                let nothing = Prepared { halves: 0, scale: 0, stride: 0, padding: 0 };
                let args = Args::new()
                    .with(self.plain(x))
                    .with(self.vector(weight))
                    .with(eps)
                    .with(width(x) as u32)
                    .with(if plain { self.plain(out) } else { 0 })
                    .with(if prepared { self.prepared(out) } else { nothing });
                launch(&self.rows.norm_rows, [rows(x) as u32, 1, 1], row_block(rows(x)), args)
            }
            Task::NormGroups { out, x, weight, eps, group } => {
                let groups = size(x) / group;
                let args = Args::new()
                    .with(self.plain(x))
                    .with(self.vector(weight))
                    .with(eps)
                    .with(group as u32)
                    .with(groups as u64)
                    .with(self.plain(out));
                launch(&self.rows.norm_groups, blocks(groups * 32), BLOCK, args)
            }
            // SAFETY: the caller's promise.
            Task::Products { x, ref of } => unsafe { self.products(x, of, rows(x)) },
            Task::Rope { out, x, head_dim, rope } => {
                let rope = &self.ropes[rope.0 as usize];
                let args = Args::new()
                    .with(self.plain(x))
                    .with(rope.table.at())
                    .with(width(x) as u32)
                    .with(head_dim as u32)
                    .with(rope.n_rot as u32)
                    .with(u32::from(rope.neox))
                    .with(size(x) as u64)
                    .with(self.plain(out));
                launch(&self.rows.rope, blocks(size(x)), BLOCK, args)
            }
            // SAFETY: the caller's promise.
            Task::Append { layer, k, v } => unsafe { self.append(sizes, layer, k, v) },
            Task::Attend { out, q, layer, rope, scale, softcap } => {
                // SAFETY: the caller's promise.
                unsafe { self.attend(sizes, out, q, layer, rope, scale, softcap) }
            }
            Task::Elements { out, a, b, what } => {
                let (kind, factor, act) = element(what);
                let args = Args::new()
                    .with(kind)
                    .with(self.plain(a))
                    .with(b.map_or(0, |b| self.plain(b)))
                    .with(factor)
                    .with(act)
                    .with(size(out) as u64)
                    .with(self.plain(out));
                launch(&self.rows.elements, blocks(size(out)), BLOCK, args)
            }
            Task::Gate { out, x, gate } => {
                let share = width(x) / width(gate);
                let args = Args::new()
                    .with(self.plain(x))
                    .with(self.plain(gate))
                    .with(share as u32)
                    .with(size(x) as u64)
                    .with(self.plain(out));
                launch(&self.rows.gate, blocks(size(x)), BLOCK, args)
            }
            Task::Select { out, x } => {
                let chosen = match self.schedule.rows_of[out.0 as usize] {
                    crate::schedule::Rows::Logits => sizes.logits_at,
                    _ => sizes.outputs_at,
                };
                let args = Args::new()
                    .with(self.plain(x))
                    .with(self.block.at(chosen))
                    .with(width(x) as u32)
                    .with(self.plain(out));
                launch(&self.rows.select_rows, [rows(out) as u32, 1, 1], BLOCK, args)
            }
            Task::Columns { out, x, group, start } => {
                let part = width(out) / (width(x) / group);
                let args = Args::new()
                    .with(self.plain(x))
                    .with(group as u32)
                    .with(start as u32)
                    .with(part as u32)
                    .with(size(out) as u64)
                    .with(self.plain(out));
                launch(&self.rows.columns, blocks(size(out)), BLOCK, args)
            }
            Task::Concat { out, a, b } => {
                let args = Args::new()
                    .with(self.plain(a))
                    .with(self.plain(b))
                    .with(width(a) as u32)
                    .with(width(b) as u32)
                    .with(size(out) as u64)
                    .with(self.plain(out));
                launch(&self.rows.concat, blocks(size(out)), BLOCK, args)
            }
        }
    }

    fn product(&self, x: Value, product: &schedule::Product, n: usize) -> Product {
        let matrix = &self.weights.matrices[&product.weight.0];
        let input = self.prepared(x);
        Product {
            weights: matrix.at,
            x: input.halves,
            x_scale: input.scale,
            out: self.plain(product.out),
            bias: self.vector(product.bias),
            residual: product.residual.map_or(0, |r| self.plain(r)),
            rows: matrix.rows as u32,
            units: matrix.format.units(matrix.cols) as u32,
            n: n as u32,
            x_stride: input.stride,
        }
    }

    /// Products of `n` rows of `x`.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn products(&self, x: Value, of: &[schedule::Product], n: usize) -> Result<(), CudaError> {
        match n {
            0 => Ok(()),
            // SAFETY: the caller's promise.
            1..=FEW_INPUTS => unsafe { self.products_of_few(x, of, n) },
            // SAFETY: the caller's promise.
            _ => of.iter().try_for_each(|p| unsafe { self.product_of_many(x, p, n) }),
        }
    }

    /// As many as possible in one launch: up to three of one format.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn products_of_few(&self, x: Value, of: &[schedule::Product], n: usize) -> Result<(), CudaError> {
        let format = |p: &schedule::Product| self.weights.matrices[&p.weight.0].format;
        for same in of.chunk_by(|a, b| format(a) == format(b)).flat_map(|same| same.chunks(3)) {
            let mut products: Products = bytemuck::Zeroable::zeroed();
            let mut end = 0;
            for (i, p) in same.iter().enumerate() {
                products.of[i] = self.product(x, p, n);
                end += self.weights.matrices[&p.weight.0].rows.div_ceil(16) as u32;
                products.ends[i] = end;
            }
            products.ends[same.len()..].fill(u32::MAX >> 1);
            let kernels = &self.weights.kernels[&format(&same[0]).ty];
            let kernel = if n <= 8 { &kernels.few8 } else { &kernels.few16 };
            // SAFETY: the caller's promise.
            unsafe { self.gpu.launch(kernel, [end, 1, 1], BLOCK, Args::new().with(products)) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn product_of_many(&self, x: Value, product: &schedule::Product, n: usize) -> Result<(), CudaError> {
        let matrix = &self.weights.matrices[&product.weight.0];
        let kernels = &self.weights.kernels[&matrix.format.ty];
        let (kernel, inputs) = if n <= 64 { (&kernels.many32, 32) } else { (&kernels.many128, 128) };
        let (across, along) = (matrix.rows.div_ceil(16).div_ceil(8), n.div_ceil(inputs));
        let parts = self.parts_of(across * along, matrix, n);
        let args = Args::new().with(self.product(x, product, n)).with(self.parts.at());
        // SAFETY: the parts have room for as many sums; the rest is the caller's promise.
        unsafe {
            self.gpu.launch(kernel, [across as u32, along as u32, parts as u32], 256, args)?;
            match parts {
                1 => Ok(()),
                _ => self.gpu.launch(&kernels.sum_parts, blocks(n * matrix.rows), BLOCK, args.with(parts as u32)),
            }
        }
    }

    /// Among how many blocks the columns of a product are shared, so that there are two for each multiprocessor.
    fn parts_of(&self, blocks: usize, matrix: &Matrix, n: usize) -> usize {
        let wanted = (2 * self.gpu.multiprocessors as usize).div_ceil(blocks).min(16);
        let room = self.parts.len() / 4 / (n * matrix.rows);
        let columns = matrix.cols / 256;
        wanted.min(room).min(columns).max(1)
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn append(&self, sizes: &Sizes, layer: KvLayerId, k: Value, v: Value) -> Result<(), CudaError> {
        let (group, place) = self.layers[layer.0 as usize];
        let at = &sizes.groups[group];
        let heads = self.graph.kv_layers[layer.0 as usize].n_kv_heads;
        for store in (0..at.writes.len()).filter(|s| at.writes[*s]) {
            let kernels = self.stores.kernels(self.stores.class_of(store));
            let args = Args::new()
                .with(self.plain(k))
                .with(self.plain(v))
                .with(self.block.at(at.appends))
                .with(self.block.at(at.n_appends))
                .with(self.stores.table(group, place))
                .with(store as u32)
                .with(heads as u32);
            let warps = sizes.tokens * heads * 2;
            // SAFETY: the table has the tiles of every store of the group; the rest is the caller's promise.
            unsafe { self.gpu.launch(&kernels.append, [warps.div_ceil(4) as u32, 1, 1], 128, args) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn attend(
        &self,
        sizes: &Sizes,
        out: Value,
        q: Value,
        layer: KvLayerId,
        rope: Option<RopeId>,
        scale: f32,
        softcap: Option<f32>,
    ) -> Result<(), CudaError> {
        let (group, place) = self.layers[layer.0 as usize];
        let at = &sizes.groups[group];
        let geometry = self.graph.kv_layers[layer.0 as usize];
        let n_heads = self.graph.width(q) / geometry.k_head_dim;
        let rope = rope.map(|r| &self.ropes[r.0 as usize]);
        let queries = Queries {
            q: self.plain(q),
            angles: rope.map_or(0, |r| r.table.at()),
            n_heads: n_heads as u32,
            n_rot: rope.map_or(0, |r| r.n_rot as u32),
            neox: rope.map_or(0, |r| u32::from(r.neox)),
            scale,
            softcap: softcap.unwrap_or(0.0),
            padding: 0,
        };
        let address = |memory: &Option<crate::driver::Memory>| memory.as_ref().map_or(0, |m| m.at());
        let results = Results { out: address(&self.partials), sums: address(&self.partial_sums) };
        for (launch, &most) in at.launches.iter().enumerate().filter(|(_, most)| **most > 0) {
            let kernels = self.stores.kernels(launch / 2);
            let (kernel, shape) = if launch % 2 == 0 { &kernels.few } else { &kernels.many };
            // SAFETY: the caller's promise.
            unsafe { self.attend_items(at, launch, most, kernel, *shape, (group, place), queries, results) }?;
        }
        let shape = self.shapes[group];
        let args = Args::new()
            .with(results.out)
            .with(results.sums)
            .with(self.block.at(at.first))
            .with(self.block.at(at.partials))
            .with(n_heads as u32)
            .with(shape.together as u32)
            .with(geometry.v_head_dim as u32)
            .with(self.plain(out));
        let threads = geometry.v_head_dim.next_multiple_of(32).min(256) as u32;
        // SAFETY: the lists have an entry for each row and group of heads; the rest is the caller's promise.
        unsafe { self.gpu.launch(&self.rows.merge, [(sizes.tokens * n_heads) as u32, 1, 1], threads, args) }
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    unsafe fn attend_items(
        &self,
        at: &GroupSizes,
        launch: usize,
        most: usize,
        kernel: &Kernel,
        shape: AttentionShape,
        (group, place): (usize, usize),
        queries: Queries,
        results: Results,
    ) -> Result<(), CudaError> {
        let args = Args::new()
            .with(self.block.at(at.counts + launch * size_of::<Counts>()))
            .with(self.block.at(at.items))
            .with(self.block.at(at.queries))
            .with(self.block.at(at.spans))
            .with(self.stores.table(group, place))
            .with(queries)
            .with(results);
        // More blocks than the card holds at once take turns.
        let blocks = most.min(self.gpu.multiprocessors as usize * 8) as u32;
        // SAFETY: partial results have room for those of every item; the rest is the caller's promise.
        unsafe { self.gpu.launch_shared(kernel, [blocks, 1, 1], shape.threads, shape.shared, args) }
    }
}
