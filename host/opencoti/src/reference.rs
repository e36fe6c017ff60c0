//! The config reference page and the example config, made from the flags.

use std::fmt::Write;

use crate::flags::{Entry, FLAGS};

/// Titles of the tables, in the order of the flags.
const TABLES: [(&str, &str); 8] = [
    ("model", "What is served"),
    ("engine", "How it is computed"),
    ("kv", "The KV cache"),
    ("admission", "Who may start"),
    ("plugins", "Where plugins come from"),
    ("server", "The HTTP server"),
    ("log", "Logging"),
    ("sampling", "Sampling where a request says nothing"),
];

const PLUGIN_HELP: &str = "\
Each `[[plugin]]` table loads one plugin. Without any, the plugins of this distribution are loaded: kv-scalar, kv-turbo,
kv-tcq, kv-kvarn, residency-resident and admission-gate.
";

/// `docs/config.md`.
pub fn page() -> String {
    let mut out = String::from(
        "# Configuration\n\nMade from the flags' declarations (`host/opencoti/src/flags/defs.rs`); a test keeps it \
         fresh. A flag can be given on the command line, by its environment twin, or by its key in `opencoti.toml`; the \
         first of these that is set wins.\n",
    );
    for (table, title) in TABLES {
        let _ = write!(out, "\n## `[{table}]`: {title}\n");
        for flag in FLAGS.iter().filter(|f| f.table() == table) {
            let _ = write!(out, "\n{}", section(flag));
        }
    }
    let _ = write!(
        out,
        "\n## `[[plugin]]`: Plugins\n\n{PLUGIN_HELP}\n\
         | key | meaning |\n|---|---|\n\
         | `name` | name in the plugin's manifest (needed) |\n\
         | `version` | semver requirement, for example `\"^1.0\"`; without it the highest version is taken |\n\
         | `path` | a file, relative to the config; without it the plugin folders are searched |\n\
         | `sha256` | expected hash of the file, hexadecimal; another one is refused |\n\
         | `kind` | kind the plugin must have, for example `kv-codec`; another one is refused |\n\
         | `config` | a table handed to the plugin |\n"
    );
    out
}

fn section(flag: &Entry) -> String {
    let mut out = format!("### `{}`\n\n{}", flag.key, flag.summary());
    let details = flag.details();
    if !details.is_empty() {
        let _ = write!(out, " {details}");
    }
    let short = flag.short.map_or(String::new(), |s| format!(", `-{s}`"));
    let value = if flag.label.is_empty() { "true|false" } else { flag.label };
    let default = if flag.default.is_empty() { "none".to_owned() } else { format!("`{}`", flag.default) };
    let _ = write!(
        out,
        "\n\nFlag `--{}`{short} · environment `{}` · value `{value}` · default {default}\n",
        flag.long,
        flag.env()
    );
    out
}

/// A commented config: every key at its default, switched off by `#`.
pub fn example(model: Option<&str>) -> String {
    let mut out = String::from("# Configuration of opencoti. A line without `#` overrides the default it shows.\n");
    for (table, title) in TABLES {
        let _ = write!(out, "\n# {title}\n[{table}]\n");
        for flag in FLAGS.iter().filter(|f| f.table() == table) {
            for line in wrap(&format!("{} {}", flag.summary(), flag.details()), 110) {
                let _ = writeln!(out, "# {line}");
            }
            match (flag.key, model) {
                ("model.path", Some(model)) => {
                    let _ = writeln!(out, "path = {}", toml::Value::String(model.to_owned()));
                }
                _ => {
                    let _ = writeln!(out, "# {} = {}", flag.leaf(), toml_default(flag));
                }
            }
        }
    }
    out.push('\n');
    for line in PLUGIN_HELP.lines() {
        let _ = writeln!(out, "# {line}");
    }
    out.push_str("# [[plugin]]\n# name = \"kv-scalar\"\n# version = \"^0.1\"\n");
    out
}

/// The default as TOML: numbers and booleans bare, text quoted, lists and tables as such.
fn toml_default(flag: &Entry) -> String {
    match (flag.label, flag.default) {
        ("A,B,…", "") => "[]".to_owned(),
        ("JSON", "") => "{}".to_owned(),
        ("", text) | ("N" | "X", text) => text.to_owned(),
        ("BYTES", text) if text.bytes().all(|b| b.is_ascii_digit()) => text.to_owned(),
        (_, text) => toml::Value::String(text.to_owned()).to_string(),
    }
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].len() + 1 + word.len() > width {
            lines.push(word.to_owned());
        } else {
            if !lines[last].is_empty() {
                lines[last].push(' ');
            }
            lines[last].push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::apply_toml;
    use crate::settings::Settings;

    #[test]
    fn every_table_has_a_title() {
        for flag in FLAGS {
            assert!(TABLES.iter().any(|(t, _)| *t == flag.table()), "{}", flag.key);
        }
    }

    #[test]
    fn the_example_is_valid_as_it_is_and_with_every_default_switched_on() {
        let example = example(Some("model.gguf"));
        apply_toml(&mut Settings::with_defaults(), &example, "example", None).unwrap();
        let keys: Vec<&str> = FLAGS.iter().filter(|f| !f.default.is_empty()).map(Entry::leaf).collect();
        let on: String = example
            .lines()
            .map(|l| match l.strip_prefix("# ") {
                Some(rest) if keys.iter().any(|k| rest.starts_with(&format!("{k} = "))) => format!("{rest}\n"),
                _ => format!("{l}\n"),
            })
            .collect();
        apply_toml(&mut Settings::with_defaults(), &on, "example", None).unwrap();
    }

    #[test]
    fn the_reference_page_is_fresh() {
        expect_test::expect_file!["../../../docs/config.md"].assert_eq(&page());
    }
}
