//! Every codec of this repository, loaded from its library, does what a codec must do.

use opencoti_plugin_api::conformance::{Case, Outcome, Plan, Report, check};
use opencoti_registry::{PluginEntry, Registry, RegistryConfig};
use opencoti_tests::plugins::plugin;

/// Runs the kit on the plugin of a package, with each set of options.
fn report(package: &str, codec: &str, options: &[&str]) -> Report {
    let cache = tempfile::tempdir().unwrap();
    let entry = PluginEntry { path: Some(plugin(package)), ..PluginEntry::named(package) };
    let config = RegistryConfig { cache: Some(cache.path().into()), plugins: vec![entry], ..RegistryConfig::default() };
    let registry = Registry::load(&config).unwrap();
    assert_eq!(registry.describe()[0].layout, "layout table agrees in every field");
    let (codecs, _) = registry.codec(codec).unwrap();
    let options = options.iter().map(ToString::to_string).collect();
    let report = check(&codecs, &Plan { options, ..Plan::default() });
    assert!(report.failures().is_empty(), "{report}");
    report
}

/// Cases that passed without options.
fn plain(report: &Report) -> usize {
    let passed = |c: &&Case| c.name.ends_with("with {}") && matches!(c.outcome, Outcome::Passed { .. });
    report.cases.iter().filter(passed).count()
}

#[test]
fn the_scalar_codecs_conform_with_and_without_rotation() {
    let report = report("kv-scalar", "q8_0", &["{}", r#"{"rotation":"hadamard"}"#]);
    // Seven codecs, two sides, five head sizes; each is supported without a rotation.
    assert_eq!(plain(&report), 7 * 2 * 5, "{report}");
}

#[test]
fn the_turbo_codecs_conform() {
    let report = report("kv-turbo", "turbo3", &["{}", r#"{"scale":"norm"}"#]);
    // Four codecs, two sides, five head sizes.
    assert_eq!(plain(&report), 4 * 2 * 5, "{report}");
}

#[test]
fn the_trellis_codecs_conform() {
    let report = report("kv-tcq", "turbo3_tcq", &["{}", r#"{"scale":"norm"}"#]);
    // Two codecs, two sides, five head sizes.
    assert_eq!(plain(&report), 2 * 2 * 5, "{report}");
}

#[test]
fn the_kvarn_codecs_conform() {
    let report = report("kv-kvarn", "kvarn4", &["{}", r#"{"floor":"reference","clip":"none"}"#]);
    // Six codecs, two sides, five head sizes.
    assert_eq!(plain(&report), 6 * 2 * 5, "{report}");
}
