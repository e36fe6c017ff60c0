//! Every codec of this repository, loaded from its library, does what a codec must do.

use opencoti_plugin_api::conformance::{Outcome, Plan, check};
use opencoti_registry::{PluginEntry, Registry, RegistryConfig};
use opencoti_tests::plugins::plugin;

#[test]
fn the_scalar_codecs_conform_with_and_without_rotation() {
    let cache = tempfile::tempdir().unwrap();
    let entry = PluginEntry { path: Some(plugin("kv-scalar")), ..PluginEntry::named("kv-scalar") };
    let config = RegistryConfig { cache: Some(cache.path().into()), plugins: vec![entry], ..RegistryConfig::default() };
    let registry = Registry::load(&config).unwrap();
    assert_eq!(registry.describe()[0].layout, "layout table agrees in every field");
    let (codecs, _) = registry.codec("q8_0").unwrap();
    let plan = Plan { options: [r#"{}"#, r#"{"rotation":"hadamard"}"#].map(String::from).to_vec(), ..Plan::default() };
    let report = check(&codecs, &plan);
    assert!(report.failures().is_empty(), "{report}");
    // Seven codecs, two sides, five head sizes; each is supported without a rotation.
    let plain = |c: &&opencoti_plugin_api::conformance::Case| {
        c.name.ends_with("with {}") && matches!(c.outcome, Outcome::Passed { .. })
    };
    assert_eq!(report.cases.iter().filter(plain).count(), 7 * 2 * 5, "{report}");
}
