//! A codec plugin that fails on demand, for tests of the host.
//!
//! Without a fault it is a whole codec that stores f32: `f32`, and `f32-reversed`, whose basis is the row backwards (a
//! permutation is orthonormal). Its config says where it fails:
//!
//! ```json
//! {"panic_in": "append", "after": 2}
//! {"error_in": "open"}
//! ```
//! `after` calls of that entry pass before the fault. Entries are those of the ABI's tables.

mod codec;
mod fault;

use opencoti_plugin_api::Error;
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::kv_codec::{CodecName, KvCodecs, OpenParams};

use codec::F32Codec;
use fault::Faults;

const CODECS: &[CodecName] = &[
    CodecName { name: "f32", summary: "rows as they are" },
    CodecName { name: "f32-reversed", summary: "rows backwards" },
];

struct Faulty {
    faults: Faults,
}

impl Plugin for Faulty {
    const ABOUT: About = About {
        name: "faulty",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "fails on demand, for tests",
        capabilities: "",
        config_schema: r#"{"type":"object","additionalProperties":false,"properties":{"panic_in":{"type":"string"},"error_in":{"type":"string"},"after":{"type":"integer","minimum":0}}}"#,
    };

    fn create(host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        let faults = Faults::from_config(config)?;
        faults.enter("create")?;
        host.debug("ready to fail");
        host.gauge("faults", 1.0);
        Ok(Faulty { faults })
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.faults.enter_infallible("destroy");
    }
}

impl KvCodecs for Faulty {
    type Codec = F32Codec;

    fn codecs(&self) -> &'static [CodecName] {
        self.faults.enter_infallible("codecs");
        CODECS
    }

    fn open(&self, params: &OpenParams) -> Result<F32Codec, Error> {
        self.faults.enter("open")?;
        F32Codec::open(params, self.faults.clone())
    }
}

opencoti_plugin_api::export_plugin!(kv_codec: Faulty);
