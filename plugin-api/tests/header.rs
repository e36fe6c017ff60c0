//! The C header is generated from the Rust source and kept in the repository: this test makes it anew and compares.
//! `UPDATE_EXPECT=1 cargo test -p opencoti-plugin-api --test header` writes it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use opencoti_plugin_api::root::{LAYOUT_SYMBOL, ROOT_SYMBOL};
use opencoti_plugin_api::{CPU_TILES_ID, DEVICE_SOURCE_ID, GGUF_ID, GRAPH_BUILDER_ID, Kind};

/// Files with structs or codes that cross, in the order of the header.
const SOURCES: [&str; 11] = [
    "lib.rs",
    "text.rs",
    "error.rs",
    "layout.rs",
    "root.rs",
    "host/mod.rs",
    "kv_codec.rs",
    "cpu_tiles.rs",
    "device_source.rs",
    "residency.rs",
    "admission.rs",
];

const STRUCTS: [&str; 26] = [
    "Str",
    "TextBuf",
    "Status",
    "ApiVersion",
    "Manifest",
    "PluginRoot",
    "HostServices",
    "FieldLayout",
    "StructLayout",
    "LayoutTable",
    "CodecInfo",
    "CodecParams",
    "CodecLayout",
    "KvCodecVtbl",
    "CpuTilesVtbl",
    "DeviceSource",
    "DeviceSourceVtbl",
    "GroupState",
    "ResidencySnapshot",
    "ResidencyDecision",
    "ResidencyPolicyVtbl",
    "StoreState",
    "AdmissionRequest",
    "AdmissionSnapshot",
    "AdmissionDecision",
    "AdmissionPolicyVtbl",
];

const CODES: [&str; 19] = [
    "PAGE_TOKENS",
    "ROOT_MAGIC",
    "API_VERSION",
    "LOG_ERROR",
    "LOG_WARN",
    "LOG_INFO",
    "LOG_DEBUG",
    "LOG_TRACE",
    "SIDE_K",
    "SIDE_V",
    "DOMAIN_PLAIN",
    "DOMAIN_ROTATED",
    "EVENT_START",
    "EVENT_GROWTH",
    "EVENT_PRESSURE",
    "EVENT_RELEASE",
    "VERDICT_ADMIT",
    "VERDICT_QUEUE",
    "VERDICT_REJECT",
];

fn crate_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn generate() -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        pragma_once: true,
        cpp_compat: true,
        documentation: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        style: cbindgen::Style::Type,
        usize_is_size_t: true,
        line_length: 110,
        ..Default::default()
    };
    config.export.include = STRUCTS.iter().chain(&CODES).map(|s| s.to_string()).collect();
    config.no_includes = true;
    config.sys_includes = ["stddef.h", "stdint.h"].map(String::from).to_vec();
    config.export.exclude = vec!["Kind".into()];
    config.export.prefix = Some("Opencoti".into());
    config.export.renaming_overrides_prefixing = true;
    config.export.rename = CODES.iter().map(|c| (c.to_string(), format!("OPENCOTI_{c}"))).collect();
    config.header = Some(introduction());
    config.after_includes = Some(names());
    config.trailer = Some(trailer());
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(crate_folder().join("src").join(source));
    }
    let mut text = Vec::new();
    builder.generate().expect("the sources of the ABI parse").write(&mut text);
    let text = String::from_utf8(text).expect("cbindgen writes UTF-8");
    for_c_readers(&text.replace("OpencotiStatus_", "OPENCOTI_"))
}

fn introduction() -> String {
    "// The plugin ABI of opencoti, for C, C++ and Zig.\n\
     //\n\
     // Generated from the crate opencoti-plugin-api; do not edit. A plugin is a shared library that exports\n\
     // opencoti_plugin_root. Structs that start with their size may get more fields at the end in later versions: set\n\
     // size to sizeof of the struct you were compiled with, and read no field beyond the size the other side gives.\n\
     //\n\
     // Labels: [main-thread] while loading, one call at a time; [engine-thread] by the scheduler's thread, one call at a\n\
     // time; [worker, re-entrant] by several threads at once, never on the same tile for writing; [any-thread] by anybody\n\
     // at any time. Pointers passed to a function are valid until it returns, unless said otherwise."
        .to_owned()
}

/// Constants that are strings, which the generator leaves out.
fn names() -> String {
    let mut out = String::new();
    let mut define = |name: &str, doc: &str, value: &str| {
        writeln!(out, "\n// {doc}\n#define OPENCOTI_{name} \"{value}\"").expect("strings take all");
    };
    define("CPU_TILES_ID", "Id of the extension with a codec's own CPU kernels.", CPU_TILES_ID);
    define("DEVICE_SOURCE_ID", "Id of the extension with a codec's source for GPUs.", DEVICE_SOURCE_ID);
    define("GRAPH_BUILDER_ID", "Reserved: id of the host's graph builder.", GRAPH_BUILDER_ID);
    define("GGUF_ID", "Reserved: id of the host's GGUF loading.", GGUF_ID);
    for kind in Kind::ALL {
        let name = format!("KIND_{}", kind.name().to_uppercase().replace('-', "_"));
        define(&name, "Name of a kind, for the manifest.", kind.name());
    }
    out
}

fn trailer() -> String {
    format!(
        "// A string literal as an OpencotiStr. In C only for static data and arguments.\n\
         #define OPENCOTI_STR(literal) {{(const uint8_t *)(literal), sizeof(literal) - 1}}\n\n\
         #ifdef __cplusplus\nextern \"C\" {{\n#endif\n\n\
         // Every plugin exports this: its root, static. [main-thread]\n\
         const OpencotiPluginRoot *{ROOT_SYMBOL}(void);\n\n\
         // A plugin may export this: the layout of the structs it was compiled with. Without it the host checks sizes\n\
         // and versions only. [main-thread]\n\
         const OpencotiLayoutTable *{LAYOUT_SYMBOL}(void);\n\n\
         #ifdef __cplusplus\n}}\n#endif\n"
    )
}

/// Turns links of Rust documentation into names of the header: `[`crate::x::Name`]` becomes `Name` with its prefix.
fn for_c_readers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("[`") {
        let (before, link) = rest.split_at(start);
        let Some(end) = link.find("`]") else { break };
        out.push_str(before);
        out.push_str(&c_name(&link[2..end]));
        rest = &link[end + 2..];
    }
    out.push_str(rest);
    out
}

fn c_name(path: &str) -> String {
    let last = path.trim_start_matches("crate::");
    if let Some(status) = last.strip_prefix("Status::") {
        return format!("OPENCOTI_{status}");
    }
    let last = last.rsplit("::").next().unwrap_or(last);
    match (STRUCTS.contains(&last), CODES.contains(&last)) {
        (true, _) => format!("Opencoti{last}"),
        (_, true) => format!("OPENCOTI_{last}"),
        _ => last.to_owned(),
    }
}

fn header_path() -> PathBuf {
    crate_folder().join("include/opencoti_plugin.h")
}

#[test]
fn the_header_in_the_repository_is_the_generated_one() {
    expect_test::expect_file![header_path()].assert_eq(&generate());
}

#[test]
fn the_header_carries_labels_documentation_and_every_struct_of_the_layout_table() {
    let header = std::fs::read_to_string(header_path()).unwrap();
    for label in ["[main-thread]", "[engine-thread]", "[any-thread]", "[worker, re-entrant]"] {
        assert!(header.contains(&format!("// `{label}`")), "{label}");
    }
    assert!(header.contains("Encodes a whole tile at once from OPENCOTI_PAGE_TOKENS rows"));
    for code in CODES {
        assert!(header.contains(&format!("#define OPENCOTI_{code} ")), "{code}");
    }
    for s in opencoti_plugin_api::layout::Layouts::ours().structs {
        assert!(header.contains(&format!("}} Opencoti{};", s.name)), "{}", s.name);
    }
}

#[test]
fn c_and_cpp_compilers_take_the_header() {
    let folder = std::env::temp_dir().join(format!("opencoti-header-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    compile(&folder, "cc", &["-std=c99", "-xc"], "use.c");
    if std::process::Command::new("c++").arg("--version").output().is_ok() {
        compile(&folder, "c++", &["-std=c++17", "-xc++"], "use.cpp");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

fn compile(folder: &Path, compiler: &str, flags: &[&str], name: &str) {
    let source = folder.join(name);
    std::fs::write(
        &source,
        "#include \"opencoti_plugin.h\"\n\
         static const OpencotiStr name = OPENCOTI_STR(OPENCOTI_KIND_KV_CODEC);\n\
         OpencotiStatus f(void) { (void)name; return OPENCOTI_OK; }\n",
    )
    .unwrap();
    let output = std::process::Command::new(compiler)
        .args(flags)
        .args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
        .arg(crate_folder().join("include"))
        .arg(&source)
        .output()
        .expect("a C compiler is a prerequisite");
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
}
