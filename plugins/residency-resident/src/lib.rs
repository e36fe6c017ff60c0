//! Residency policy `residency-resident`: every page stays on the device.
//!
//! The simplest policy there is, and the fastest while it fits. It never streams: when the device's budget is too
//! small it refuses and says by how much, so that the operator learns at start and not from a slow server.

use opencoti_plugin_api::Error;
use opencoti_plugin_api::export::{About, Plugin, residency_policy_root};
use opencoti_plugin_api::host::Host;
use opencoti_plugin_api::residency::{Decision, GroupState, ResidencyPolicy, Snapshot};
use opencoti_plugin_api::root::PluginRoot;

/// The policy. It has no state and no config.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resident;

/// The root, for a host that links the plugin in.
pub fn root() -> &'static PluginRoot {
    residency_policy_root::<Resident>()
}

impl Plugin for Resident {
    const ABOUT: About = About {
        name: "residency-resident",
        version: env!("CARGO_PKG_VERSION"),
        license: env!("CARGO_PKG_LICENSE"),
        summary: "every KV page stays on the device; refuses what does not fit",
        capabilities: "",
        config_schema: r#"{"type":"object","additionalProperties":false}"#,
    };

    fn create(_host: Host, config: &serde_json::Value) -> Result<Self, Error> {
        Resident::from_config(config)
    }
}

impl Resident {
    /// The policy of a config table, which must be empty.
    pub fn from_config(config: &serde_json::Value) -> Result<Self, Error> {
        match config.as_object() {
            None => Err(Error::new(format!("the config of residency-resident is {config}, expected an empty table"))),
            Some(table) => match table.keys().next() {
                Some(key) => Err(Error::new(format!("residency-resident has no config key `{key}`; remove it"))),
                None => Ok(Resident),
            },
        }
    }
}

impl ResidencyPolicy for Resident {
    fn plan(&self, snapshot: &Snapshot) -> Result<Decision, Error> {
        // Pages are counts the host chose; a product beyond 64 bits fits no device.
        let needed = total_bytes(snapshot.groups).unwrap_or(u64::MAX);
        if needed > snapshot.device_budget {
            return Err(Error::new(format!(
                "the KV cache needs {} on the device and may take {} ({} missing{}); lower the context size or the \
                 number of slots, choose KV codecs with fewer bits, or raise the device's budget",
                bytes(needed),
                bytes(snapshot.device_budget),
                bytes(needed - snapshot.device_budget),
                largest(snapshot.groups)
            )));
        }
        Ok(Decision { device_pages: snapshot.groups.iter().map(|g| g.pages_total).collect(), staging_slots: 0 })
    }
}

fn total_bytes(groups: &[GroupState]) -> Option<u64> {
    groups.iter().try_fold(0u64, |sum, g| sum.checked_add(g.page_bytes.checked_mul(g.pages_total)?))
}

/// Which group takes most, when there is a choice.
fn largest(groups: &[GroupState]) -> String {
    let bytes_of = |g: &GroupState| g.page_bytes.saturating_mul(g.pages_total);
    match groups.iter().enumerate().max_by_key(|(_, g)| bytes_of(g)) {
        Some((i, g)) if groups.len() > 1 => {
            let kind = match g.window {
                0 => "full attention".to_owned(),
                window => format!("window of {window}"),
            };
            format!("; group {i}, {kind}, {} layers, takes {}", g.layers, bytes(bytes_of(g)))
        }
        _ => String::new(),
    }
}

fn bytes(n: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.into_iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", n as f64 / unit as f64),
        None if n == 1 => "1 byte".to_owned(),
        None => format!("{n} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(page_bytes: u64, pages_total: u64, window: u32) -> GroupState {
        GroupState { page_bytes, pages_total, pages_used: 0, layers: 5, window }
    }

    fn plan(groups: &[GroupState], device_budget: u64) -> Result<Decision, Error> {
        Resident.plan(&Snapshot { event: 0, groups, device_budget, host_budget: 0, link_bytes_per_second: 0.0 })
    }

    #[test]
    fn what_fits_exactly_stays_whole() {
        let decision = plan(&[group(1000, 6, 0), group(500, 8, 512)], 10_000).unwrap();
        assert_eq!(decision, Decision { device_pages: vec![6, 8], staging_slots: 0 });
        assert_eq!(plan(&[], 0).unwrap().device_pages, Vec::<u64>::new());
    }

    #[test]
    fn one_byte_too_many_is_refused_with_the_figures_and_what_to_lower() {
        let error = plan(&[group(1000, 6, 0), group(500, 8, 512)], 9_999).unwrap_err();
        assert_eq!(
            error.message,
            "the KV cache needs 9.77 KiB on the device and may take 9.76 KiB (1 byte missing; group 0, full attention, \
             5 layers, takes 5.86 KiB); lower the context size or the number of slots, choose KV codecs with fewer \
             bits, or raise the device's budget"
        );
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        assert!(plan(&[group(u64::MAX, 2, 0)], u64::MAX - 1).is_err());
        assert!(plan(&[group(u64::MAX, 1, 0), group(1, 1, 0)], u64::MAX - 1).is_err());
    }

    #[test]
    fn a_config_key_is_refused() {
        let error = Resident::from_config(&serde_json::json!({"spill": true})).unwrap_err();
        assert_eq!(error.message, "residency-resident has no config key `spill`; remove it");
        assert!(Resident::from_config(&serde_json::json!([])).is_err());
    }
}
