//! Bad plugins: files that are none, plugins of another version, layout or kind, and plugins that panic in each entry.
//! Each is refused in one sentence or quarantined, the process lives, and the next load works.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use expect_test::{Expect, expect};
use opencoti_plugin_api::host::{AdmissionPlugin, Codec, Instance, NoSink, ResidencyPlugin, Sink};
use opencoti_plugin_api::kv_codec::Side;
use opencoti_plugin_api::{Error, PAGE_TOKENS, Status};
use opencoti_registry::{PluginEntry, PluginInfo, Refusal, Registry, RegistryConfig, State, inspect};
use opencoti_tests::plugins::{c_fixtures, compile_c, plugin};
use serde_json::{Value, json};

/// A folder for a test's libraries and the loader's copies.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The codec in C, in the variant of `flags`.
    fn c_codec(&self, name: &str, flags: &[&str]) -> PathBuf {
        let path = self.path(name);
        compile_c("codec.c", flags, &path).unwrap();
        path
    }

    fn config(&self, plugins: Vec<PluginEntry>) -> RegistryConfig {
        RegistryConfig {
            folders: vec![self.folder.path().to_path_buf()],
            cache: Some(self.path("cache")),
            plugins,
            linked: Vec::new(),
        }
    }

    fn load(&self, entry: PluginEntry) -> Result<Registry, Refusal> {
        Registry::load(&self.config(vec![entry]))
    }

    fn inspect(&self, path: &Path) -> Result<PluginInfo, Refusal> {
        inspect(path, Some(&self.path("cache")))
    }

    /// Asserts the sentence, with this test's folder written as `DIR`, and that it is one sentence.
    fn refuses(&self, outcome: Result<impl Sized, Refusal>, expected: Expect) {
        let Err(refusal) = outcome else { panic!("expected a refusal: {expected:?}") };
        let text = refusal.to_string();
        assert!(!text.contains('\n') && text.len() < 500, "one short sentence: {text}");
        expected.assert_eq(&text.replace(&self.folder.path().display().to_string(), "DIR"));
    }
}

fn at(name: &str, path: PathBuf) -> PluginEntry {
    PluginEntry { path: Some(path), ..PluginEntry::named(name) }
}

fn faulty(config: Value) -> PluginEntry {
    PluginEntry { config, ..at("faulty", plugin("faulty")) }
}

// ---- files that are no plugins

#[test]
fn a_text_file_is_no_library() {
    let bench = Bench::new();
    let path = bench.write("plugin.so", b"#!/bin/sh\necho I am a plugin\n");
    bench.refuses(bench.load(at("p", path)), expect![[r##"DIR/plugin.so is not a shared library (starts with "#!/bin/sh\necho I"), expected an ELF library; give the path of the built plugin"##]]);
}

#[test]
fn an_empty_file_is_no_library() {
    let bench = Bench::new();
    bench.refuses(bench.inspect(&bench.write("plugin.so", b"")), expect!["DIR/plugin.so is not a shared library (starts with nothing: it is empty), expected an ELF library; give the path of the built plugin"]);
}

#[test]
fn a_missing_file_and_a_directory_are_named() {
    let bench = Bench::new();
    bench.refuses(
        bench.load(at("p", bench.path("nowhere.so"))),
        expect!["plugin file DIR/nowhere.so does not exist; correct the entry's `path` or build the plugin"],
    );
    bench.refuses(
        bench.load(at("p", bench.folder.path().to_path_buf())),
        expect!["DIR is a directory, expected a shared library; give the path of the library file"],
    );
}

#[test]
#[cfg(unix)]
fn a_pipe_is_not_waited_for() {
    let bench = Bench::new();
    let path = bench.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    bench.refuses(
        bench.inspect(&path),
        expect!["DIR/pipe is a device, pipe or socket, expected a shared library; give the path of the library file"],
    );
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_cut_short_at_any_place_is_refused_before_it_is_mapped() {
    let bench = Bench::new();
    let whole = std::fs::read(bench.c_codec("whole.so", &[])).unwrap();
    for part in [1, 10, 30, 50, 70] {
        let path = bench.write("cut.so", &whole[..whole.len() * part / 100]);
        let refusal = bench.inspect(&path).unwrap_err();
        assert!(matches!(refusal, Refusal::WrongImage { .. }), "{part} %: {refusal}");
    }
    bench.refuses(bench.inspect(&bench.write("cut.so", &whole[..1000])), expect!["DIR/cut.so cannot be loaded here: found 1000 bytes, expected at least 2000 by its headers: the file is cut short; get or build the plugin again"]);
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_library_for_another_machine_is_named() {
    let bench = Bench::new();
    let mut bytes = std::fs::read(bench.c_codec("codec.so", &[])).unwrap();
    bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
    bench.refuses(bench.inspect(&bench.write("arm.so", &bytes)), expect!["DIR/arm.so cannot be loaded here: found a library for aarch64, expected x86_64; get or build the plugin again"]);
}

#[test]
fn a_library_without_a_root_is_no_plugin() {
    let bench = Bench::new();
    let inspect = |source: &str| {
        let path = bench.path("lib.so");
        compile_c(source, &[], &path).unwrap();
        bench.inspect(&path)
    };
    bench.refuses(inspect("no_plugin.c"), expect!["DIR/lib.so is a shared library but no plugin: it exports no `opencoti_plugin_root`; export it with `export_plugin!` or as `opencoti_plugin.h` says"]);
    bench.refuses(inspect("hidden_root.c"), expect!["DIR/lib.so is a shared library but no plugin: it exports no `opencoti_plugin_root`; export it with `export_plugin!` or as `opencoti_plugin.h` says"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_missing_symbol_is_found_at_load_and_not_at_the_first_call() {
    let bench = Bench::new();
    let path = bench.c_codec("codec.so", &["-DFIXTURE_MISSING"]);
    bench.refuses(bench.inspect(&path), expect!["DIR/codec.so cannot be opened by the system's loader (undefined symbol: opencoti_fixture_nobody_defines_this); install what it needs or build it again"]);
}

// ---- plugins of another version, layout, kind

#[test]
fn another_major_version_is_refused() {
    let bench = Bench::new();
    bench.refuses(bench.inspect(&bench.c_codec("codec.so", &["-DFIXTURE_MAJOR=2"])), expect!["DIR/codec.so was built for plugin API 2.0.0, expected 1.x; use a plugin built for that, or a host of the plugin's version"]);
}

#[test]
fn another_magic_is_refused() {
    let bench = Bench::new();
    bench.refuses(bench.inspect(&bench.c_codec("codec.so", &["-DFIXTURE_MAGIC=0x1234"])), expect!["DIR/codec.so has a root with the magic 0x0000000000001234, expected 0x69746f636e65706f; it is no plugin of opencoti"]);
}

#[test]
fn a_null_root_is_refused() {
    let bench = Bench::new();
    bench.refuses(bench.inspect(&bench.c_codec("codec.so", &["-DFIXTURE_NULL_ROOT"])), expect!["DIR/codec.so is broken: `opencoti_plugin_root` returned 0x0, expected the address of a static struct; report it to the plugin's author"]);
}

#[test]
fn a_changed_signature_is_refused_and_named() {
    let bench = Bench::new();
    bench.refuses(bench.inspect(&bench.c_codec("codec.so", &["-DFIXTURE_LAYOUT"])), expect![[r#"DIR/codec.so was built with another layout of the plugin API: field 1 `query_bytes` of `CpuTilesVtbl`: expected `query_bytes: unsafe extern "C" fn(*mut c_void)->usize` at offset 8, found `query_bytes: unsafe extern "C" fn(*mut c_void)->u32` at offset 8; build it with an unchanged API of version 1.x"#]]);
}

#[test]
fn a_missing_function_is_refused_and_named() {
    let bench = Bench::new();
    bench.refuses(
        bench.inspect(&bench.c_codec("codec.so", &["-DFIXTURE_NULL"])),
        expect!["DIR/codec.so is broken: its `KvCodecVtbl` has no function `append`; report it to the plugin's author"],
    );
}

#[test]
fn a_manifest_that_makes_no_sense_is_refused() {
    let bench = Bench::new();
    let with = |name: &str, flag: &str| bench.inspect(&bench.c_codec(name, &[flag]));
    bench.refuses(with("a.so", "-DFIXTURE_KIND=\"kv-codek\""), expect!["DIR/a.so is a plugin of unknown kind `kv-codek`, expected one of `kv-codec`, `residency-policy`, `attention-variant`, `drafter`, `admission-policy`, `pacing-policy`, `draft-depth-policy`, `media-engine`; it needs a newer host"]);
    bench.refuses(with("b.so", "-DFIXTURE_VERSION=\"one\""), expect!["DIR/b.so is broken: `version` of its manifest is `one`, expected a semantic version (unexpected character 'o' while parsing major version number); report it to the plugin's author"]);
    bench.refuses(with("c.so", "-DFIXTURE_NAME=\"My Codec\""), expect![[r#"DIR/c.so is broken: `name` of its manifest is "My Codec", expected 1 to 64 lower-case letters, digits, `-`, `_` or `.`; report it to the plugin's author"#]]);
    bench.refuses(
        with("d.so", "-DFIXTURE_NAME=\"\\xff\""),
        expect!["DIR/d.so is broken: `name` of its manifest is not UTF-8 text; report it to the plugin's author"],
    );
}

#[test]
fn a_plugin_of_another_kind_than_expected_is_refused() {
    let bench = Bench::new();
    let path = bench.c_codec("codec.so", &[]);
    let of_kind = |kind: &str| PluginEntry { kind: Some(kind.into()), ..at("c-codec", path.clone()) };
    bench.refuses(bench.load(of_kind("admission-policy")), expect!["plugin `c-codec` is of kind `kv-codec`, expected `admission-policy` by its entry; correct `kind` or name another plugin"]);
    bench.refuses(bench.load(of_kind("kv-codecs")), expect!["`kind` of plugin `c-codec` is `kv-codecs`, expected one of `kv-codec`, `residency-policy`, `attention-variant`, `drafter`, `admission-policy`, `pacing-policy`, `draft-depth-policy`, `media-engine`; did you mean `kv-codec`"]);
    let path = bench.c_codec("drafter.so", &["-DFIXTURE_KIND=OPENCOTI_KIND_DRAFTER"]);
    assert_eq!(bench.inspect(&path).unwrap().kind, "drafter");
    bench.refuses(bench.load(at("c-codec", path)), expect!["plugin `c-codec` is of kind `drafter`, which this version of the host cannot use; remove its entry or update the host"]);
}

#[test]
fn a_plugin_of_another_name_is_refused() {
    let bench = Bench::new();
    bench.refuses(
        bench.load(at("kv-scalar", bench.c_codec("codec.so", &[]))),
        expect!["DIR/codec.so is the plugin `c-codec`, expected `kv-scalar` by its entry; correct `name` or `path`"],
    );
}

#[test]
fn a_wrong_checksum_is_refused_before_any_code_runs() {
    let bench = Bench::new();
    let path = bench.c_codec("codec.so", &["-DFIXTURE_MAJOR=2"]);
    let with = |sha: &str| PluginEntry { sha256: Some(sha.into()), ..at("c-codec", path.clone()) };
    // Were it opened, its API version would be the refusal.
    let refusal = bench.load(with(&"0".repeat(64))).err().unwrap();
    assert!(matches!(refusal, Refusal::Checksum { .. }), "{refusal}");
    bench.refuses(
        bench.load(with("abc")),
        expect!["`sha256` of plugin `c-codec` is `abc`, expected 64 hex digits; take them from `sha256sum FILE`"],
    );
}

// ---- selection

#[test]
fn the_highest_version_that_fits_is_taken() {
    let bench = Bench::new();
    for version in ["1.2.0", "1.10.0", "2.0.0"] {
        let define = format!("-DFIXTURE_VERSION=\"{version}\"");
        bench.c_codec(&format!("libc_codec-{version}.so"), &[&define]);
    }
    let load = |requirement: Option<&str>| {
        let version = requirement.map(|r| r.parse().unwrap());
        bench.load(PluginEntry { version, ..PluginEntry::named("c-codec") })
    };
    for (requirement, version) in [(None, "2.0.0"), (Some("1"), "1.10.0"), (Some("<1.10"), "1.2.0")] {
        assert_eq!(load(requirement).unwrap().describe()[0].version, version, "{requirement:?}");
    }
    bench.refuses(load(Some("^3")), expect!["plugin `c-codec` was found in version 1.2.0, 1.10.0, 2.0.0, expected ^3; install a matching version or change `version`"]);
}

#[test]
fn two_different_files_of_one_version_are_ambiguous_until_a_digest_decides() {
    let bench = Bench::new();
    let first = bench.c_codec("libc_codec.so", &[]);
    bench.c_codec("libc_codec_1.so", &["-DFIXTURE_NEWER"]);
    bench.refuses(bench.load(PluginEntry::named("c-codec")), expect!["plugin `c-codec` 1.0.0 was found twice, as DIR/libc_codec.so and as DIR/libc_codec_1.so; set `path` or `sha256` to say which one"]);
    let sha256 = bench.inspect(&first).unwrap().sha256;
    let registry = bench.load(PluginEntry { sha256, ..PluginEntry::named("c-codec") }).unwrap();
    assert_eq!(registry.describe()[0].path.as_deref(), Some(first.as_path()));
}

#[test]
fn an_unknown_name_gets_the_nearest_one_there_is() {
    let bench = Bench::new();
    bench.c_codec("libwhatever.so", &[]);
    bench.refuses(bench.load(PluginEntry::named("c-codecs")), expect!["plugin `c-codecs` was not found in DIR (there: `c-codec`); did you mean `c-codec`; correct `name`, or set `path`"]);
    let nowhere = RegistryConfig { folders: vec![], ..bench.config(vec![PluginEntry::named("c-codec")]) };
    bench.refuses(Registry::load(&nowhere), expect!["plugin `c-codec` was not found in any plugin folder, since none is set (there: nothing); correct `name`, or set `path`"]);
}

#[test]
fn a_broken_file_of_the_right_name_is_the_one_reported() {
    let bench = Bench::new();
    bench.write("libc_codec.so", b"not a library");
    bench.refuses(bench.load(PluginEntry::named("c-codec")), expect![[r#"DIR/libc_codec.so is not a shared library (starts with "not a library"), expected an ELF library; give the path of the built plugin"#]]);
}

#[test]
fn a_codec_that_two_plugins_offer_is_named_with_its_plugin() {
    let bench = Bench::new();
    let twin = bench.c_codec("twin.so", &["-DFIXTURE_NAME=\"twin\""]);
    let entries = vec![at("c-codec", bench.c_codec("codec.so", &[])), at("twin", twin)];
    let registry = Registry::load(&bench.config(entries.clone())).unwrap();
    bench.refuses(
        registry.codec("c-f32"),
        expect!["codec `c-f32` is offered by the plugins `c-codec` and `twin`; write `c-codec/c-f32` or `twin/c-f32`"],
    );
    assert_eq!(registry.codec("twin/c-f32").unwrap().0.instance().name(), "twin");
    bench.refuses(
        registry.codec("c-f16"),
        expect![
            "codec `c-f16` is offered by no plugin (offered: `c-f32`); did you mean `c-f32`; list a plugin that has it"
        ],
    );
    let doubled = [entries[0].clone(), entries[0].clone()].to_vec();
    bench.refuses(
        Registry::load(&bench.config(doubled)),
        expect!["plugin `c-codec` is listed twice, expected one entry for each plugin; remove one of them"],
    );
}

// ---- plugins that load

fn verdict(bench: &Bench, flags: &[&str]) -> PluginInfo {
    let registry = bench.load(at("c-codec", bench.c_codec("codec.so", flags))).unwrap();
    let (plugin, name) = registry.codec("c-f32").unwrap();
    let codec = plugin.open(&name, "{}", Side::K, 24).unwrap();
    assert_eq!(round_trip(&codec).unwrap(), 0.0);
    registry.describe().remove(0)
}

#[test]
fn a_codec_in_c_loads_and_works() {
    let bench = Bench::new();
    let info = verdict(&bench, &[]);
    assert_eq!((info.name.as_str(), info.api.as_str(), info.kind.as_str()), ("c-codec", "1.0.0", "kv-codec"));
    assert_eq!(info.layout, "no layout table: checked by sizes and ids");
    assert_eq!((info.capabilities, info.state, info.failures), (vec!["files".to_owned()], State::Active, 0));
    assert_eq!(info.codecs[0].summary, "rows as they are, in C");
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_binary_built_for_api_1_0_still_loads_and_works() {
    let bench = Bench::new();
    let path = c_fixtures().join("../abi/1.0/c_codec.x86_64-linux.so");
    let registry = bench.load(at("c-codec", path)).unwrap();
    assert_eq!(registry.describe()[0].api, "1.0.0");
    let (plugin, name) = registry.codec("c-f32").unwrap();
    assert_eq!(round_trip(&plugin.open(&name, "{}", Side::V, 40).unwrap()).unwrap(), 0.0);
}

#[test]
fn a_plugin_with_shorter_tables_loads() {
    let info = verdict(&Bench::new(), &["-DFIXTURE_OLDER"]);
    assert_eq!((info.license.as_str(), info.summary.as_str(), info.config_schema), ("MIT", "", None));
}

#[test]
fn a_plugin_of_a_later_minor_version_with_more_fields_loads() {
    let info = verdict(&Bench::new(), &["-DFIXTURE_NEWER"]);
    assert_eq!(info.api, "1.7.0");
    assert_eq!(info.layout, "layout table agrees but for fields that only one side has");
}

#[test]
fn the_codec_in_c_conforms() {
    let bench = Bench::new();
    let registry = bench.load(at("c-codec", bench.c_codec("codec.so", &[]))).unwrap();
    let (plugin, _) = registry.codec("c-f32").unwrap();
    let report = opencoti_plugin_api::conformance::check(&plugin, &Default::default());
    assert!(report.failures().is_empty(), "{report}");
}

#[test]
fn plugins_of_this_repository_agree_with_the_host_in_every_field() {
    let bench = Bench::new();
    for (package, kind) in
        [("residency-resident", "residency-policy"), ("admission-gate", "admission-policy"), ("faulty", "kv-codec")]
    {
        let info = bench.inspect(&plugin(package)).unwrap();
        assert_eq!((info.name.as_str(), info.kind.as_str(), info.api.as_str()), (package, kind, "1.0.0"));
        assert_eq!(info.layout, "layout table agrees in every field");
        assert_eq!(info.license, "MIT OR Apache-2.0");
    }
}

#[test]
fn a_replaced_file_is_loaded_anew_and_the_old_one_lives_on() {
    let bench = Bench::new();
    let load = || bench.load(at("c-codec", bench.path("codec.so"))).unwrap();
    bench.c_codec("codec.so", &["-DFIXTURE_VERSION=\"1.0.0\""]);
    let old = load();
    bench.c_codec("codec.so", &["-DFIXTURE_VERSION=\"1.1.0\""]);
    let new = load();
    std::fs::write(bench.path("codec.so"), b"overwritten in place").unwrap();
    for (registry, version) in [(&old, "1.0.0"), (&new, "1.1.0")] {
        assert_eq!(registry.describe()[0].version, version);
        let (plugin, name) = registry.codec("c-f32").unwrap();
        assert_eq!(round_trip(&plugin.open(&name, "{}", Side::V, 8).unwrap()).unwrap(), 0.0);
    }
}

// ---- plugins that fail in their code

/// Encodes and decodes a page through every function of an opened codec; the largest error.
fn round_trip(codec: &Codec) -> Result<f32, Error> {
    let d = codec.head_dim();
    let rows: Vec<f32> = (0..PAGE_TOKENS * d).map(|i| (i % 97) as f32 - 48.0).collect();
    let mut back = vec![0f32; rows.len()];
    let mut tile = vec![0u8; codec.layout().tile_bytes];
    // SAFETY: the tile and the rows are whole pages.
    unsafe {
        codec.append(tile.as_mut_ptr(), 0, 3, rows.as_ptr(), d)?;
        codec.encode_page(tile.as_mut_ptr(), rows.as_ptr(), d)?;
        codec.decode_page(tile.as_ptr(), 0, PAGE_TOKENS, back.as_mut_ptr(), d)?;
        codec.transform_query(back.as_mut_ptr(), PAGE_TOKENS, d)?;
        codec.transform_output(back.as_mut_ptr(), PAGE_TOKENS, d)?;
        codec.transform_output(back.as_mut_ptr(), PAGE_TOKENS, d)?;
    }
    use_tiles(codec, &tile, &rows)?;
    Ok(rows.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
}

fn use_tiles(codec: &Codec, tile: &[u8], rows: &[f32]) -> Result<(), Error> {
    let Some(tiles) = codec.cpu_tiles() else { return Ok(()) };
    let d = codec.head_dim();
    let mut prepared = vec![0u8; tiles.query_bytes().max(64)];
    let mut scores = vec![0f32; PAGE_TOKENS];
    let mut acc = vec![0f32; d];
    // SAFETY: one row each, over one whole tile.
    unsafe {
        if codec.side() == Side::K {
            tiles.prepare_query(rows.as_ptr(), 1, d, prepared.as_mut_ptr())?;
            tiles.score(prepared.as_ptr(), 1, tile.as_ptr(), 0, PAGE_TOKENS, scores.as_mut_ptr(), PAGE_TOKENS)?;
        }
        tiles.accumulate(scores.as_ptr(), PAGE_TOKENS, 1, tile.as_ptr(), 0, PAGE_TOKENS, acc.as_mut_ptr(), d)
    }
}

/// Loads `faulty` with a fault, opens its rotated codec and uses everything.
fn use_faulty(bench: &Bench, config: Value) -> (Option<Registry>, Result<f32, Error>) {
    let registry = match bench.load(faulty(config)) {
        Ok(registry) => registry,
        Err(Refusal::Create { reason, .. }) => return (None, Err(Error { message: reason, status: Status::PANIC })),
        Err(other) => panic!("{other}"),
    };
    let (plugin, name) = registry.codec("f32-reversed").unwrap();
    let outcome = plugin.open(&name, "{}", Side::K, 16).and_then(|codec| round_trip(&codec));
    (Some(registry), outcome)
}

#[test]
fn the_faulty_plugin_is_a_whole_codec_without_a_fault() {
    let bench = Bench::new();
    let (registry, outcome) = use_faulty(&bench, json!({}));
    assert_eq!(outcome, Ok(0.0));
    let (plugin, _) = registry.unwrap().codec("f32").unwrap();
    let report = opencoti_plugin_api::conformance::check(&plugin, &Default::default());
    assert!(report.failures().is_empty(), "{report}");
}

const ENTRIES: [&str; 13] = [
    "create",
    "codecs",
    "open",
    "layout",
    "query_bytes",
    "append",
    "encode_page",
    "decode_page",
    "transform_query",
    "transform_output",
    "prepare_query",
    "score",
    "accumulate",
];

#[test]
fn a_panic_in_any_entry_is_an_error_and_a_quarantine_and_the_next_load_works() {
    let bench = Bench::new();
    for entry in ENTRIES {
        let (registry, outcome) = use_faulty(&bench, json!({"panic_in": entry}));
        let error = outcome.unwrap_err();
        assert_eq!(error.message, format!("the plugin panicked: asked to panic in {entry}"));
        assert_eq!(error.status, Status::PANIC, "{entry}");
        if let Some(registry) = registry {
            let info = registry.describe().remove(0);
            assert_eq!(info.state, State::Quarantined(error.message.clone()), "{entry}");
            assert_eq!(info.failures, 1, "{entry}");
            let (plugin, name) = registry.codec("f32").unwrap();
            let refused = plugin.open(&name, "{}", Side::K, 16).err().unwrap();
            assert_eq!(
                refused.message,
                format!("plugin `faulty` is in quarantine (the plugin panicked: asked to panic in {entry})")
            );
        }
        assert_eq!(use_faulty(&bench, json!({})).1, Ok(0.0), "the next load after a panic in {entry}");
    }
}

#[test]
fn a_panic_while_closing_or_destroying_quarantines_and_the_process_lives() {
    let bench = Bench::new();
    for (entry, opens) in [("close", true), ("destroy", false)] {
        let registry = bench.load(faulty(json!({"panic_in": entry}))).unwrap();
        let (plugin, name) = registry.codec("f32").unwrap();
        let health = Arc::clone(plugin.instance().health());
        if opens {
            drop(plugin.open(&name, "{}", Side::V, 16).unwrap());
        }
        drop((plugin, registry));
        assert_eq!(health.reason().unwrap(), format!("the plugin panicked: asked to panic in {entry}"));
    }
    assert_eq!(use_faulty(&bench, json!({})).1, Ok(0.0));
}

#[test]
fn a_quarantined_codec_is_not_called_again() {
    let bench = Bench::new();
    let registry = bench.load(faulty(json!({"panic_in": "append"}))).unwrap();
    let (plugin, name) = registry.codec("f32").unwrap();
    let (first, second) =
        (plugin.open(&name, "{}", Side::K, 8).unwrap(), plugin.open(&name, "{}", Side::V, 8).unwrap());
    assert!(round_trip(&first).is_err());
    let error = round_trip(&second).unwrap_err();
    assert!(error.message.contains("is in quarantine"), "{}", error.message);
    assert_eq!(registry.describe()[0].failures, 1, "the second codec was not asked");
}

#[test]
fn an_error_is_passed_on_and_quarantines_nobody() {
    let bench = Bench::new();
    let fallible = ENTRIES.iter().filter(|e| !["codecs", "layout", "query_bytes", "create"].contains(e));
    for entry in fallible {
        let (registry, outcome) = use_faulty(&bench, json!({"error_in": entry}));
        assert_eq!(outcome.unwrap_err(), Error::new(format!("asked to fail in {entry}")));
        let info = registry.unwrap().describe().remove(0);
        assert_eq!((info.state, info.failures), (State::Active, 1), "{entry}");
    }
    bench.refuses(
        bench.load(faulty(json!({"error_in": "create"}))),
        expect!["plugin `faulty` did not start: asked to fail in create"],
    );
}

#[test]
fn a_fault_may_come_late() {
    let bench = Bench::new();
    let registry = bench.load(faulty(json!({"panic_in": "append", "after": 2}))).unwrap();
    let (plugin, name) = registry.codec("f32").unwrap();
    let codec = plugin.open(&name, "{}", Side::K, 8).unwrap();
    assert_eq!(round_trip(&codec), Ok(0.0));
    assert_eq!(round_trip(&codec), Ok(0.0));
    assert_eq!(round_trip(&codec).unwrap_err().status, Status::PANIC);
}

#[test]
fn a_config_the_plugin_refuses_is_its_own_sentence() {
    let bench = Bench::new();
    bench.refuses(
        bench.load(faulty(json!({"after": "soon"}))),
        expect![[r#"plugin `faulty` did not start: config key `after` of faulty is "soon", expected a count"#]],
    );
}

#[test]
fn log_lines_and_gauges_of_a_plugin_reach_the_sink_under_its_name() {
    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);
    impl Sink for Heard {
        fn log(&self, plugin: &str, level: u32, message: &str) {
            self.0.lock().unwrap().push(format!("{plugin} {level} {message}"));
        }
        fn gauge(&self, plugin: &str, name: &str, value: f64) {
            self.0.lock().unwrap().push(format!("{plugin} {name}={value}"));
            panic!("a sink that panics is the host's own trouble, not the plugin's");
        }
    }
    let bench = Bench::new();
    let heard = Arc::new(Heard::default());
    let plugins = vec![faulty(json!({})), at("c-codec", bench.c_codec("codec.so", &[]))];
    let registry = Registry::load_with(&bench.config(plugins), Arc::clone(&heard) as Arc<dyn Sink>).unwrap();
    let expected = ["faulty 4 ready to fail", "faulty faults=1", "c-codec 3 hello from C"];
    assert_eq!(*heard.0.lock().unwrap(), expected);
    assert!(registry.describe().iter().all(|p| p.state == State::Active));
}

#[test]
#[cfg(unix)]
fn a_file_that_may_not_be_read_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    let path = bench.write("secret.so", b"x");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    // The superuser reads everything; there the file is refused for what it is.
    if std::fs::read(&path).is_err() {
        let text = bench.inspect(&path).unwrap_err().to_string();
        assert!(text.contains("cannot be read (") && text.contains("make it readable"), "{text}");
    }
}

#[test]
fn an_unsupported_head_size_is_no_failure() {
    let bench = Bench::new();
    let registry = bench.load(at("c-codec", bench.c_codec("codec.so", &[]))).unwrap();
    let (plugin, name) = registry.codec("c-f32").unwrap();
    let error = plugin.open(&name, "{}", Side::K, 5000).err().unwrap();
    assert_eq!((error.status, error.message.as_str()), (Status::UNSUPPORTED, "c-f32 takes head sizes of 1 to 4096"));
    assert_eq!(registry.describe()[0].failures, 0);
}

mod policies {
    //! Policies that panic, linked in: the same root and the same glue as from a file.

    use opencoti_plugin_api::admission::{self, AdmissionPolicy};
    use opencoti_plugin_api::export::{About, Plugin, admission_policy_root, residency_policy_root};
    use opencoti_plugin_api::host::Host;
    use opencoti_plugin_api::residency::{self, ResidencyPolicy};

    use super::*;

    struct Panicking;

    impl Plugin for Panicking {
        const ABOUT: About = About {
            name: "panicking",
            version: "1.0.0",
            license: "MIT",
            summary: "panics",
            capabilities: "",
            config_schema: "",
        };

        fn create(_: Host, _: &Value) -> Result<Self, Error> {
            Ok(Panicking)
        }
    }

    impl AdmissionPolicy for Panicking {
        fn decide(&self, _: &admission::Request, _: &admission::Snapshot) -> Result<admission::Decision, Error> {
            panic!("no decision")
        }
    }

    impl ResidencyPolicy for Panicking {
        fn plan(&self, _: &residency::Snapshot) -> Result<residency::Decision, Error> {
            panic!("no plan")
        }
    }

    fn quarantined_after(instance: &Instance, error: Error, text: &str) {
        assert_eq!((error.status, error.message.as_str()), (Status::PANIC, text));
        assert_eq!(instance.health().reason().as_deref(), Some(text));
    }

    #[test]
    fn a_panicking_admission_policy_is_quarantined() {
        let instance = Instance::create(admission_policy_root::<Panicking>(), "{}", Arc::new(NoSink)).unwrap();
        let policy = AdmissionPlugin::new(Arc::clone(&instance)).unwrap();
        let error = policy.decide(&Default::default(), &Default::default()).unwrap_err();
        quarantined_after(&instance, error, "the plugin panicked: no decision");
        assert!(policy.decide(&Default::default(), &Default::default()).unwrap_err().message.contains("quarantine"));
        assert!(ResidencyPlugin::new(instance).is_err(), "a policy of another kind");
    }

    #[test]
    fn a_panicking_residency_policy_is_quarantined() {
        let instance = Instance::create(residency_policy_root::<Panicking>(), "{}", Arc::new(NoSink)).unwrap();
        let policy = ResidencyPlugin::new(Arc::clone(&instance)).unwrap();
        let snapshot = residency::Snapshot {
            event: residency::EVENT_START,
            groups: &[],
            device_budget: 0,
            host_budget: 0,
            link_bytes_per_second: 0.0,
        };
        quarantined_after(&instance, policy.plan(&snapshot).unwrap_err(), "the plugin panicked: no plan");
    }

    #[test]
    fn linked_plugins_are_selected_like_files() {
        let bench = Bench::new();
        let linked = vec![admission_policy_root::<Panicking>()];
        let config = RegistryConfig { linked, ..bench.config(vec![PluginEntry::named("panicking")]) };
        let registry = Registry::load(&config).unwrap();
        assert!(registry.admission().is_some() && registry.residency().is_none());
        let info = registry.describe().remove(0);
        assert_eq!((info.path, info.layout.as_str()), (None, "linked into the host"));
    }

    #[test]
    fn two_policies_of_a_kind_are_refused() {
        let bench = Bench::new();
        let linked = vec![admission_policy_root::<Panicking>()];
        let plugins = vec![at("admission-gate", plugin("admission-gate")), PluginEntry::named("panicking")];
        bench.refuses(Registry::load(&RegistryConfig { linked, ..bench.config(plugins) }), expect!["plugins `admission-gate` and `panicking` are both of kind `admission-policy`, expected at most one; remove one of the entries"]);
    }
}
