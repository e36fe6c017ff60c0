//! Scalar KV codecs: f16, bf16 and the 32-value block formats q8_0, q6_0, q5_1, q5_0, q4_0, each with an optional
//! orthonormal rotation in front.
//!
//! # Options
//! `{"rotation": "none" | "hadamard"}`, `none` when absent. With `hadamard` a row is multiplied by a Walsh–Hadamard
//! matrix (in blocks of the largest power of two that divides the head size) before it is stored, which spreads
//! outlier channels over the block; decoded rows are then in that basis.
//!
//! # Layout of a tile
//! A block is 32 consecutive values of one row. ggml stores a block as the fields scale, minimum, high bits, codes, next to
//! each other; such blocks of 34 or 18 bytes are never aligned. Here each field has a plane of its own, in reverse
//! order, the widest first:
//!
//! | plane | q8_0 | q6_0 | q5_1 | q5_0 | q4_0 | f16, bf16 |
//! |---|---|---|---|---|---|---|
//! | codes, bytes a block | 32 | 16 | 16 | 16 | 16 | 64 |
//! | high bits | – | 8 | 4 | 4 | – | – |
//! | minimum, f16 | – | – | 2 | – | – | – |
//! | scale, f16 | 2 | 2 | 2 | 2 | 2 | – |
//!
//! A plane holds slot 0, slot 1, … and in a slot block 0, block 1, …; inside a field the bits are ggml's. So slot `t`,
//! block `b` of a plane of `n` bytes a block starts at `(t * head_dim / 32 + b) * n` of the plane, and a plane is
//! `128 * head_dim / 32 * n` bytes long. [`ScalarCodec::ggml_row`] gives a row as ggml lays it out.
//!
//! # Kernels
//! A tile is read once for all query rows: codes come into registers and are multiplied there with up to six rows. f16 and
//! bf16 are read in f32 arithmetic, so that fused results equal decode-then-attend up to the order of sums. Integer codes are
//! multiplied with queries and weights that were rounded to 16 bits, which costs half as much: see `kernels/codes.rs` for
//! what it leaves of accuracy.

mod codec;
mod formats;
mod kernels;
mod vectors;

use opencoti_kv_common::options::no_config;
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::kv_codec::{CodecName, KvCodecs, OpenParams};
use opencoti_plugin_api::{Error, PluginRoot};

pub use codec::ScalarCodec;
pub use formats::BLOCK;
pub use opencoti_kv_common::{Level, block_size, wht};

use formats::{Bf16, F16, Format, Q4_0, Q5_0, Q5_1, Q6_0, Q8_0};

/// The plugin.
pub struct ScalarCodecs;

/// The root, for linking the plugin in.
pub fn root() -> &'static PluginRoot {
    opencoti_plugin_api::export::kv_codec_root::<ScalarCodecs>()
}

impl Plugin for ScalarCodecs {
    const ABOUT: About = About {
        name: "kv-scalar",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "Scalar KV codecs: f16, bf16, q8_0, q6_0, q5_1, q5_0, q4_0, with optional rotation",
        capabilities: "",
        config_schema: r#"{"type":"object","properties":{},"additionalProperties":false}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        no_config(config, Self::ABOUT.name)?;
        Ok(ScalarCodecs)
    }
}

/// Every codec, in the order they are listed.
const CODECS: &[CodecName] = &[
    CodecName { name: F16::NAME, summary: "IEEE half floats, 16 bits a value" },
    CodecName { name: Bf16::NAME, summary: "bfloat16, 16 bits a value" },
    CodecName { name: Q8_0::NAME, summary: "8-bit codes with a scale per 32 values, 8.5 bits a value" },
    CodecName { name: Q6_0::NAME, summary: "6-bit codes with a scale per 32 values, 6.5 bits a value" },
    CodecName { name: Q5_1::NAME, summary: "5-bit codes with scale and minimum per 32 values, 6 bits a value" },
    CodecName { name: Q5_0::NAME, summary: "5-bit codes with a scale per 32 values, 5.5 bits a value" },
    CodecName { name: Q4_0::NAME, summary: "4-bit codes with a scale per 32 values, 4.5 bits a value" },
];

impl KvCodecs for ScalarCodecs {
    type Codec = ScalarCodec;

    fn codecs(&self) -> &'static [CodecName] {
        CODECS
    }

    fn open(&self, params: &OpenParams) -> Result<ScalarCodec, Error> {
        ScalarCodec::open(params, Level::detect())
    }
}
