//! Rotated, trellis-coded KV codecs: turbo2_tcq and turbo3_tcq.
//!
//! Groups are normalised and rotated as by the turbo codecs; their values are then coded together, as a path through a
//! trellis of 64 states ([`trellis`]): the same bits reach a 1.7 to 2.2 dB smaller error than one code a value. Encoding
//! searches the best of all paths and costs 512 (3 bits) or 256 (2 bits) products a value; decoding is one look-up.
//!
//! | codec | bytes of 128 values | bits a value | relative squared error, normal rows |
//! |---|---|---|---|
//! | turbo2_tcq | 36 | 2.25 | .0793 |
//! | turbo3_tcq | 52 | 3.25 | .0211 |
//!
//! # Options
//! `{"scale": "unbiased" | "least-squares" | "norm"}`: see [`opencoti_kv_common::scale`]; "unbiased" for keys and
//! "least-squares" for values when absent.
//!
//! # Layout
//! See [`opencoti_kv_common::grouped`]. The codes of a group are its stream of bits, filled up to an even number of
//! bytes, as in public code (whose codebooks differ: nothing is exchanged with it).

mod trellis;

use opencoti_kv_common::isa::{Isa, Level};
use opencoti_kv_common::options::{no_codec, no_config};
use opencoti_kv_common::{Fit, GroupCodec, GroupFormat};
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::kv_codec::{CodecName, KvCodecs, OpenParams};
use opencoti_plugin_api::{Error, PluginRoot};

use trellis::Codebook;

/// For two bits; SHA-256 of the little-endian 16-bit words 5d138a657c1654d4….
static BOOK_2: Codebook<2, 4, 256, 1024> = Codebook::parse(include_bytes!("codebook_2.hex"));
/// For three bits; SHA-256 c3e257c8bcb0c15c….
static BOOK_3: Codebook<3, 8, 512, 4096> = Codebook::parse(include_bytes!("codebook_3.hex"));

/// The plugin.
pub struct TrellisCodecs;

/// The root, for linking the plugin in.
pub fn root() -> &'static PluginRoot {
    opencoti_plugin_api::export::kv_codec_root::<TrellisCodecs>()
}

impl Plugin for TrellisCodecs {
    const ABOUT: About = About {
        name: "kv-tcq",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "Rotated, trellis-coded KV codecs: turbo2_tcq, turbo3_tcq",
        capabilities: "",
        config_schema: r#"{"type":"object","properties":{},"additionalProperties":false}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        no_config(config, Self::ABOUT.name)?;
        Ok(TrellisCodecs)
    }
}

/// Every codec, in the order they are listed.
const CODECS: &[CodecName] = &[
    CodecName { name: "turbo2_tcq", summary: "rotated, trellis of 2-bit codes, 2.25 bits a value" },
    CodecName { name: "turbo3_tcq", summary: "rotated, trellis of 3-bit codes, 3.25 bits a value" },
];

/// Opens what `params` name, with the kernels of `level`, which the processor must run.
///
/// # Errors
/// Codecs, head sizes and options that it does not know.
pub fn open(params: &OpenParams, level: Level) -> Result<GroupCodec, Error> {
    let open = match params.codec.as_str() {
        "turbo2_tcq" => GroupCodec::open::<Two>,
        "turbo3_tcq" => GroupCodec::open::<Three>,
        other => return Err(no_codec("kv-tcq", other, CODECS)),
    };
    open(params, "trellis", level)
}

impl KvCodecs for TrellisCodecs {
    type Codec = GroupCodec;

    fn codecs(&self) -> &'static [CodecName] {
        CODECS
    }

    fn open(&self, params: &OpenParams) -> Result<GroupCodec, Error> {
        open(params, Level::detect())
    }
}

/// Streams of two-bit codes.
struct Two;
/// Streams of three-bit codes.
struct Three;

/// The format of a codebook.
macro_rules! format_of {
    ($format:ident, $book:ident, $type:ty) => {
        impl GroupFormat for $format {
            fn code_bytes(n: usize) -> usize {
                <$type>::stream_bytes(n)
            }

            #[inline(always)]
            fn encode(y: &[f32], codes: &mut [u8]) -> Fit {
                let path = $book.encode(y);
                <$type>::write(&path, y.len(), codes);
                let (mut product, mut square) = (0.0, 0.0);
                for (t, y) in y.iter().enumerate() {
                    let level = $book.level(&path, t);
                    product += y * level;
                    square += level * level;
                }
                Fit::Levels { product, square }
            }

            #[inline(always)]
            unsafe fn decode<I: Isa>(codes: &[u8], scale: f32, out: &mut [f32]) {
                // SAFETY: features by the caller.
                unsafe { $book.read::<I>(codes, scale, out) }
            }

            fn public_codes(codes: &[u8], _: usize, out: &mut Vec<u8>) {
                out.extend_from_slice(codes);
            }
        }
    };
}

format_of!(Two, BOOK_2, Codebook<2, 4, 256, 1024>);
format_of!(Three, BOOK_3, Codebook<3, 8, 512, 4096>);
