//! Loaded kernels, and the structs that they take, field by field as in the sources.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::CudaError;
use crate::compile::{Cache, CodecSource, Program};
use crate::driver::{Gpu, Kernel, Module};

/// `Prepared` of rows.cu: where prepared inputs of products lie.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Prepared {
    /// f16 values.
    pub halves: u64,
    /// A factor a row.
    pub scale: u64,
    /// Halves of a row.
    pub stride: u32,
    /// Nothing.
    pub padding: u32,
}

/// `Product` of products.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Product {
    /// Packed weights.
    pub weights: u64,
    /// Prepared inputs.
    pub x: u64,
    /// Their factors.
    pub x_scale: u64,
    /// f32 results.
    pub out: u64,
    /// f32 bias or 0.
    pub bias: u64,
    /// What is added, as the results; or 0.
    pub residual: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Units of a row.
    pub units: u32,
    /// Input rows.
    pub n: u32,
    /// Halves of an input row.
    pub x_stride: u32,
}

/// `Products` of products.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Products {
    /// Up to three.
    pub of: [Product; 3],
    /// Blocks before which each ends.
    pub ends: [u32; 3],
    /// Nothing.
    pub padding: u32,
}

/// `Tiles` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Tiles {
    /// Page 0.
    pub base: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Keys of head 0 in a page.
    pub k_offset: u64,
    /// Values of head 0 in a page.
    pub v_offset: u64,
    /// Bytes of a head's keys.
    pub k_tile_bytes: u32,
    /// Bytes of a head's values.
    pub v_tile_bytes: u32,
}

/// `Query` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Query {
    /// Row among those that attend.
    pub row: u32,
    /// Its token's position.
    pub position: u32,
    /// Row of the angles.
    pub angle: u32,
}

/// `Span` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Span {
    /// Page of the store.
    pub page: u32,
    /// Position of its first token.
    pub position: u32,
    /// Tokens.
    pub length: u32,
}

/// `Item` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Item {
    /// Among the group's queries.
    pub first_query: u32,
    /// How many.
    pub n_queries: u32,
    /// Among the group's spans.
    pub first_span: u32,
    /// How many.
    pub n_spans: u32,
    /// KV head.
    pub kv_head: u32,
    /// First query head.
    pub first_head: u32,
    /// Query heads.
    pub n_heads: u32,
    /// 0 causal, 1 every, 2 window.
    pub mask: u32,
    /// Of a window.
    pub window: u32,
    /// Which store.
    pub store: u32,
    /// First partial result: a query's heads lie one after the other.
    pub partial: u32,
    /// Nothing.
    pub reserved: u32,
}

/// `Append` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Append {
    /// Row of the step.
    pub row: u32,
    /// Which store.
    pub store: u32,
    /// Its page.
    pub page: u32,
    /// Slot in the page.
    pub slot: u32,
}

/// `Counts` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
pub struct Counts {
    /// First item of a launch.
    pub first_item: u32,
    /// How many.
    pub n_items: u32,
}

/// `Queries` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Queries {
    /// Unrotated.
    pub q: u64,
    /// Angles or 0.
    pub angles: u64,
    /// Query heads of a row.
    pub n_heads: u32,
    /// Elements that rotate.
    pub n_rot: u32,
    /// How they are paired.
    pub neox: u32,
    /// Factor on scores.
    pub scale: f32,
    /// Cap on scores, 0 for none.
    pub softcap: f32,
    /// Nothing.
    pub padding: u32,
}

/// `Results` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Results {
    /// Partial results.
    pub out: u64,
    /// Their maxima and sums.
    pub sums: u64,
}

/// Kernels for products with one weight format.
pub struct ProductKernels {
    pub(crate) pack: Kernel,
    pub(crate) embed: Kernel,
    pub(crate) few8: Kernel,
    pub(crate) few16: Kernel,
    pub(crate) many32: Kernel,
    pub(crate) many128: Kernel,
    pub(crate) sum_parts: Kernel,
    _module: Module,
}

impl ProductKernels {
    /// Compiles and loads.
    pub fn new(gpu: &Arc<Gpu>, cache: &Cache, format: &str) -> Result<Self, CudaError> {
        let module = gpu.load(&cache.cubin(&Program::products(format), gpu.arch)?)?;
        let kernel = |name| module.kernel(name, 0);
        Ok(ProductKernels {
            pack: kernel("pack")?,
            embed: kernel("embed")?,
            few8: kernel("few8")?,
            few16: kernel("few16")?,
            many32: kernel("many32")?,
            many128: kernel("many128")?,
            sum_parts: kernel("sum_parts")?,
            _module: module,
        })
    }
}

/// Kernels on rows, and the merge of attention.
pub struct RowKernels {
    pub(crate) prepare: Kernel,
    pub(crate) gated_prepare: Kernel,
    pub(crate) norm_rows: Kernel,
    pub(crate) norm_groups: Kernel,
    pub(crate) angles: Kernel,
    pub(crate) rope: Kernel,
    pub(crate) elements: Kernel,
    pub(crate) gate: Kernel,
    pub(crate) select_rows: Kernel,
    pub(crate) columns: Kernel,
    pub(crate) concat: Kernel,
    pub(crate) merge: Kernel,
    _modules: [Module; 2],
}

impl RowKernels {
    /// Compiles and loads.
    pub fn new(gpu: &Arc<Gpu>, cache: &Cache) -> Result<Self, CudaError> {
        let rows = gpu.load(&cache.cubin(&Program::rows(), gpu.arch)?)?;
        let merge = gpu.load(&cache.cubin(&Program::merge(), gpu.arch)?)?;
        let kernel = |name| rows.kernel(name, 0);
        Ok(RowKernels {
            prepare: kernel("prepare")?,
            gated_prepare: kernel("gated_prepare")?,
            norm_rows: kernel("norm_rows")?,
            norm_groups: kernel("norm_groups")?,
            angles: kernel("angles")?,
            rope: kernel("rope")?,
            elements: kernel("elements")?,
            gate: kernel("gate")?,
            select_rows: kernel("select_rows")?,
            columns: kernel("columns")?,
            concat: kernel("concat")?,
            merge: merge.kernel("merge", 0)?,
            _modules: [rows, merge],
        })
    }
}

/// Threads, rows of queries and shared memory of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub(crate) threads: u32,
    pub(crate) rows: u32,
    pub(crate) shared: u32,
}

/// Kernels of attention over one pair of codecs.
pub struct AttentionKernels {
    pub(crate) append: Kernel,
    pub(crate) few: (Kernel, AttentionShape),
    pub(crate) many: (Kernel, AttentionShape),
    _module: Module,
}

impl AttentionKernels {
    /// Compiles and loads.
    pub fn new(
        gpu: &Arc<Gpu>,
        cache: &Cache,
        keys: (&CodecSource, usize),
        values: (&CodecSource, usize),
    ) -> Result<Self, CudaError> {
        let program = Program::attention(keys.0, keys.1, values.0, values.1);
        let module = gpu.load(&cache.cubin(&program, gpu.arch)?)?;
        let facts: [u32; 6] = module.words("attention_facts")?;
        let shape = |f: &[u32]| AttentionShape { threads: f[0], rows: f[1], shared: f[2] };
        let (few, many) = (shape(&facts[..3]), shape(&facts[3..]));
        Ok(AttentionKernels {
            append: module.kernel("append", 0)?,
            few: (module.kernel("attend_few", few.shared)?, few),
            many: (module.kernel("attend_many", many.shared)?, many),
            _module: module,
        })
    }
}
