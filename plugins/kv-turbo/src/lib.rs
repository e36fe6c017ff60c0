//! Rotated KV codecs with few levels: turbo2, turbo3, turbo4 and turbo8.
//!
//! A row is cut into groups of 128 channels (a head of 64 or 96 is one group). A group is normalised, rotated by fixed random
//! signs around a Hadamard transform, which makes its values nearly normal whatever they were, and stored as a code a
//! value and one half-float scale (TurboQuant, arXiv 2504.19874, without its residual).
//!
//! | codec | codes | bytes of 128 values | bits a value | relative squared error, normal rows |
//! |---|---|---|---|---|
//! | turbo2 | 4 Lloyd-Max levels | 34 | 2.125 | .1175 |
//! | turbo3 | 8 Lloyd-Max levels | 50 | 3.125 | .0345 |
//! | turbo4 | 16 Lloyd-Max levels | 66 | 4.125 | .0095 |
//! | turbo8 | 256 even steps up to the largest value | 130 | 8.125 | .00004 |
//!
//! # Options
//! `{"scale": "unbiased" | "least-squares" | "norm"}`: see [`opencoti_kv_common::scale`]; "unbiased" for keys and
//! "least-squares" for values when absent. Decoding is the same for all. turbo8 has no such option: its scale is given
//! by the largest value.
//!
//! # Layout
//! See [`opencoti_kv_common::grouped`] and [`opencoti_kv_common::lanes`]; [`GroupCodec::public_row`] gives a row as public
//! code lays it out.

mod formats;

use opencoti_kv_common::GroupCodec;
use opencoti_kv_common::isa::Level;
use opencoti_kv_common::options::{no_codec, no_config};
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::kv_codec::{CodecName, KvCodecs, OpenParams};
use opencoti_plugin_api::{Error, PluginRoot};

use formats::{Bytes, Levels};

/// The plugin.
pub struct TurboCodecs;

/// The root, for linking the plugin in.
pub fn root() -> &'static PluginRoot {
    opencoti_plugin_api::export::kv_codec_root::<TurboCodecs>()
}

impl Plugin for TurboCodecs {
    const ABOUT: About = About {
        name: "kv-turbo",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "Rotated KV codecs with few levels: turbo2, turbo3, turbo4, turbo8",
        capabilities: "",
        config_schema: r#"{"type":"object","properties":{},"additionalProperties":false}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        no_config(config, Self::ABOUT.name)?;
        Ok(TurboCodecs)
    }
}

/// Every codec, in the order they are listed.
const CODECS: &[CodecName] = &[
    CodecName { name: "turbo2", summary: "rotated, 4 levels, 2.125 bits a value" },
    CodecName { name: "turbo3", summary: "rotated, 8 levels, 3.125 bits a value" },
    CodecName { name: "turbo4", summary: "rotated, 16 levels, 4.125 bits a value" },
    CodecName { name: "turbo8", summary: "rotated, 256 even steps, 8.125 bits a value" },
];

/// Opens what `params` name, with the kernels of `level`, which the processor must run.
///
/// # Errors
/// Codecs, head sizes and options that it does not know.
pub fn open(params: &OpenParams, level: Level) -> Result<GroupCodec, Error> {
    let open = match params.codec.as_str() {
        "turbo2" => GroupCodec::open::<Levels<2>>,
        "turbo3" => GroupCodec::open::<Levels<3>>,
        "turbo4" => GroupCodec::open::<Levels<4>>,
        "turbo8" => GroupCodec::open::<Bytes>,
        other => return Err(no_codec("kv-turbo", other, CODECS)),
    };
    open(params, "turbo", level)
}

impl KvCodecs for TurboCodecs {
    type Codec = GroupCodec;

    fn codecs(&self) -> &'static [CodecName] {
        CODECS
    }

    fn open(&self, params: &OpenParams) -> Result<GroupCodec, Error> {
        open(params, Level::detect())
    }
}
