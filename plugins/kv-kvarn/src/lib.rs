//! KVarN: KV codecs that encode 128 tokens of a head together (arXiv 2606.03458), at 2, 3, 4, 5, 6 or 8 bits a value.
//!
//! Every row is rotated by a Walsh–Hadamard matrix over the whole head (in blocks of the largest power of two that divides
//! its size). 128 rotated tokens by up to 128 channels make a matrix whose rows and columns are brought to equal variance
//! ([`balance`]); then each row is quantised on a uniform grid of its own. The row's scale disappears into the grid, so
//! that only one factor a column is stored besides: `x = (code * scale[row] + zero[row]) * other[column]`.
//!
//! Rows are channels for keys and tokens for values: keys differ by channel, values by token.
//!
//! A whole page is encoded at once, from exact tokens that the cache keeps until then: `append` is refused.
//!
//! # Options
//! - `"floor"`: `"wide"` (when absent) balances tiles of any magnitude in 4 rounds; `"reference"` has the limits of the
//!   first releases, 16 rounds that cannot raise a row or column whose deviation is below 0.74.
//! - `"clip"`: `"search"` (when absent) tries 21 ranges for the grid of a row, from the whole of it to two fifths, and
//!   takes the one with the least squared error; `"none"` takes the whole.
//!
//! # Layout of a tile
//! A head of more than 128 channels is cut into slices of 128, each a record of its own, one after the other:
//!
//! | part | bytes |
//! |---|---|
//! | codes, row after row | `rows * columns * bits / 8` |
//! | scale of each row, f16 | `2 * rows` |
//! | zero of each row, f16 | `2 * rows` |
//! | factor of each column, f16 | `2 * columns` |
//!
//! In a row the bits of the codes lie in planes of 8, 4, 2 or 1 bits ([`pack`]), so that a few shifts and masks unpack
//! a whole vector; [`KvarnCodec::row`] gives a row as a plain bit string.

pub mod balance;
mod codec;
pub mod pack;
mod tiles;

use opencoti_kv_common::options::no_config;
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::kv_codec::{CodecName, KvCodecs, OpenParams};
use opencoti_plugin_api::{Error, PluginRoot};

pub use codec::{KvarnCodec, SLICE};
pub use opencoti_kv_common::Level;

/// The plugin.
pub struct KvarnCodecs;

/// The root, for linking the plugin in.
pub fn root() -> &'static PluginRoot {
    opencoti_plugin_api::export::kv_codec_root::<KvarnCodecs>()
}

impl Plugin for KvarnCodecs {
    const ABOUT: About = About {
        name: "kv-kvarn",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "KVarN KV codecs: rotated tiles of 128 tokens, balanced along tokens and channels, at 2 to 8 bits",
        capabilities: "",
        config_schema: r#"{"type":"object","properties":{},"additionalProperties":false}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        no_config(config, "kv-kvarn").map(|()| KvarnCodecs)
    }
}

/// Every codec with its bits, in the order they are listed.
const CODECS: &[CodecName] = &[
    CodecName { name: "kvarn2", summary: "balanced tiles of 128 tokens, 2-bit codes, 2.375 bits a value" },
    CodecName { name: "kvarn3", summary: "balanced tiles of 128 tokens, 3-bit codes, 3.375 bits a value" },
    CodecName { name: "kvarn4", summary: "balanced tiles of 128 tokens, 4-bit codes, 4.375 bits a value" },
    CodecName { name: "kvarn5", summary: "balanced tiles of 128 tokens, 5-bit codes, 5.375 bits a value" },
    CodecName { name: "kvarn6", summary: "balanced tiles of 128 tokens, 6-bit codes, 6.375 bits a value" },
    CodecName { name: "kvarn8", summary: "balanced tiles of 128 tokens, 8-bit codes, 8.375 bits a value" },
];

impl KvCodecs for KvarnCodecs {
    type Codec = KvarnCodec;

    fn codecs(&self) -> &'static [CodecName] {
        CODECS
    }

    fn open(&self, params: &OpenParams) -> Result<KvarnCodec, Error> {
        KvarnCodec::open(params, Level::detect())
    }
}
