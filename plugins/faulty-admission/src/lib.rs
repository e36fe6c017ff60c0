//! An admission policy that panics at every decision, for tests of the host.

use opencoti_plugin_api::Error;
use opencoti_plugin_api::admission::{AdmissionPolicy, Decision, Request, Snapshot};
use opencoti_plugin_api::export::{About, Plugin};
use opencoti_plugin_api::host::Host;

struct FaultyAdmission;

impl Plugin for FaultyAdmission {
    const ABOUT: About = About {
        name: "faulty-admission",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "panics at every decision, for tests",
        capabilities: "",
        config_schema: r#"{"type":"object","additionalProperties":false}"#,
    };

    fn create(_: Host, _: &serde_json::Value) -> Result<Self, Error> {
        Ok(FaultyAdmission)
    }
}

impl AdmissionPolicy for FaultyAdmission {
    fn decide(&self, _: &Request, _: &Snapshot) -> Result<Decision, Error> {
        panic!("asked to panic in decide")
    }
}

opencoti_plugin_api::export_plugin!(admission_policy: FaultyAdmission);
