//! The command line, made from the flags.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::flags::{Entry, FLAGS};
use crate::{bench, lab};

/// What the user asked for.
#[derive(Debug, PartialEq, Eq)]
pub enum Task {
    /// Run the server.
    Serve {
        /// Flags and config file.
        layers: Layers,
        /// Print a curl line once ready.
        print_curl: bool,
    },
    /// Validate a config and say what would be loaded.
    Check {
        /// Flags and config file.
        layers: Layers,
    },
    /// Chat in the terminal.
    Chat {
        /// Flags and config file, for a server of our own.
        layers: Layers,
        /// A running server.
        url: Option<String>,
        /// Its key.
        key: Option<String>,
        /// System text.
        system: Option<String>,
    },
    /// List plugins, or inspect one file.
    Plugins {
        /// Flags and config file.
        layers: Layers,
        /// The file.
        file: Option<PathBuf>,
        /// As JSON.
        json: bool,
    },
    /// Inspect a model file.
    Model {
        /// Flags and config file.
        layers: Layers,
        /// The file.
        file: PathBuf,
        /// As JSON.
        json: bool,
    },
    /// Measure speed.
    Bench {
        /// Flags and config file.
        layers: Layers,
        /// What is measured.
        options: bench::Options,
    },
    /// Measure fidelity.
    Lab {
        /// Flags and config file.
        layers: Layers,
        /// What all experiments are told.
        options: lab::Options,
        /// What is measured.
        experiment: lab::Experiment,
    },
    /// Print the config reference or an example config.
    HelpConfig {
        /// The example in place of the reference.
        example: bool,
        /// Model path to write into the example.
        model: Option<String>,
    },
}

/// Layers of configuration above the defaults.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// Config file.
    pub config: Option<PathBuf>,
    /// Flags that were given, by long name.
    pub arguments: BTreeMap<String, String>,
}

fn argument(flag: &'static Entry) -> Arg {
    let default = if flag.default.is_empty() { String::new() } else { format!("; default: {}", flag.default) };
    let note = format!("[{}; config: {}{default}]", flag.env(), flag.key);
    let mut arg = Arg::new(flag.long)
        .long(flag.long)
        .help(format!("{} {note}", flag.summary()))
        .long_help(format!("{} {}\n{note}", flag.summary(), flag.details()))
        .action(ArgAction::Set)
        .allow_negative_numbers(true)
        .help_heading(heading(flag.table()));
    if let Some(short) = flag.short {
        arg = arg.short(short);
    }
    if flag.label.is_empty() {
        arg.num_args(0..=1).require_equals(true).default_missing_value("true").value_name("true|false")
    } else {
        arg.value_name(flag.label)
    }
}

fn heading(table: &'static str) -> &'static str {
    match table {
        "model" => "Model",
        "engine" => "Engine",
        "kv" => "KV cache",
        "admission" => "Admission",
        "plugins" => "Plugins",
        "server" => "Server",
        "log" => "Logging",
        _ => "Sampling defaults",
    }
}

/// Tables of the config that concern a measurement.
const MEASURED: [&str; 4] = ["model", "engine", "kv", "plugins"];

/// The flags of a command that runs a model without serving it.
fn with_measured_layers(command: Command) -> Command {
    let flags = FLAGS.iter().filter(|f| MEASURED.contains(&f.table()));
    command.arg(config_file()).args(flags.map(argument))
}

fn with_layers(command: Command) -> Command {
    command.arg(config_file()).args(FLAGS.iter().map(argument))
}

fn config_file() -> Arg {
    Arg::new("config").long("config").short('c').value_name("FILE").help("Config file (TOML)")
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

/// The whole command.
pub fn command() -> Command {
    Command::new("opencoti")
        .version(env!("CARGO_PKG_VERSION"))
        .about("An LLM inference server that is a plugin host")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            with_layers(Command::new("serve").about("Run the server"))
                .arg(switch("print-curl", "Print a curl line that works once the server is ready")),
        )
        .subcommand(with_layers(Command::new("check").about("Validate a config and say what would be loaded")))
        .subcommand(
            with_layers(Command::new("chat").about("Chat in the terminal, with a running server or one of its own"))
                .arg(Arg::new("url").long("url").help("Address of a running server, such as http://127.0.0.1:8080"))
                .arg(Arg::new("key").long("key").env_opt("OPENCOTI_KEY").help("Key for that server"))
                .arg(Arg::new("system").long("system").help("System text")),
        )
        .subcommand(
            with_layers(Command::new("plugins").about("List the plugins, or inspect a plugin file"))
                .arg(
                    Arg::new("file")
                        .value_name("FILE")
                        .value_parser(clap::value_parser!(PathBuf))
                        .help("A plugin file"),
                )
                .arg(switch("json", "As JSON, the same facts as GET /plugins")),
        )
        .subcommand(
            with_layers(
                Command::new("model").about("Inspect a GGUF: sizes, tokenizer, what KV and state cost").long_about(
                    "Inspect a GGUF: sizes, active weights, tokenizer, what keys and values cost a token with each codec and \
                     recurrent state a sequence. In place of a file, NAME or NAME:QUANTISATION of a preset of `cargo xtask \
                     synth` gives the figures of a real model by its shape, for example gemma4-26b-a4b or qwen3-14b:q8_0.",
                ),
            )
            .arg(
                Arg::new("file")
                    .value_name("FILE|PRESET")
                    .required(true)
                    .value_parser(clap::value_parser!(PathBuf))
                    .help("A model file"),
            )
            .arg(switch("json", "As JSON")),
        )
        .subcommand(bench::args::add(with_measured_layers(
            Command::new("bench").about("Measure speed: prompts, decoding and batches, against what memory allows"),
        )))
        .subcommand(lab::args::command(with_measured_layers))
        .subcommand(
            Command::new("help-config")
                .about("Print the config reference, or an example config")
                .arg(switch("example", "A commented opencoti.toml"))
                .arg(Arg::new("model").long("model").value_name("PATH").help("Model to write into the example")),
        )
}

/// Environment twins of arguments that are no flags of the config.
trait EnvOpt {
    fn env_opt(self, name: &'static str) -> Self;
}

impl EnvOpt for Arg {
    fn env_opt(self, name: &'static str) -> Self {
        match std::env::var(name) {
            Ok(value) => self.default_value(value),
            Err(_) => self,
        }
    }
}

/// Reads the command line; exits with clap's message when it can't be read.
pub fn parse() -> Task {
    task(&command().get_matches())
}

fn task(matches: &ArgMatches) -> Task {
    let text = |m: &ArgMatches, name: &str| m.get_one::<String>(name).cloned();
    match matches.subcommand() {
        Some(("serve", m)) => Task::Serve { layers: layers(m), print_curl: m.get_flag("print-curl") },
        Some(("check", m)) => Task::Check { layers: layers(m) },
        Some(("chat", m)) => {
            Task::Chat { layers: layers(m), url: text(m, "url"), key: text(m, "key"), system: text(m, "system") }
        }
        Some(("plugins", m)) => {
            Task::Plugins { layers: layers(m), file: m.get_one("file").cloned(), json: m.get_flag("json") }
        }
        Some(("model", m)) => Task::Model {
            layers: layers(m),
            file: m.get_one::<PathBuf>("file").cloned().unwrap_or_default(),
            json: m.get_flag("json"),
        },
        Some(("bench", m)) => Task::Bench { layers: layers(m), options: bench::args::read(m) },
        Some(("lab", m)) => {
            let (m, options, experiment) = lab::args::read(m);
            Task::Lab { layers: layers(m), options, experiment }
        }
        Some((_, m)) => Task::HelpConfig { example: m.get_flag("example"), model: text(m, "model") },
        None => Task::HelpConfig { example: false, model: None },
    }
}

fn layers(matches: &ArgMatches) -> Layers {
    Layers {
        config: matches.get_one::<String>("config").map(PathBuf::from),
        arguments: FLAGS
            .iter()
            .filter_map(|f| Some((f.long.to_owned(), matches.try_get_one::<String>(f.long).ok()??.clone())))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Task {
        task(&command().try_get_matches_from(args).unwrap())
    }

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn serve_takes_a_config_and_flags() {
        let Task::Serve { layers, print_curl } =
            parse(&["opencoti", "serve", "-c", "x.toml", "--port", "0", "--metrics=false", "--props", "-s", "-1"])
        else {
            panic!()
        };
        assert!(!print_curl);
        assert_eq!(layers.config, Some("x.toml".into()));
        let expected = [("metrics", "false"), ("port", "0"), ("props", "true"), ("seed", "-1")];
        assert_eq!(layers.arguments, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }

    #[test]
    fn help_shows_every_flag_with_its_twins() {
        let help = command().find_subcommand_mut("serve").unwrap().render_long_help().to_string();
        for flag in FLAGS {
            assert!(help.contains(&format!("--{}", flag.long)), "{}", flag.long);
            assert!(help.contains(&flag.env()) && help.contains(flag.key), "{}", flag.long);
        }
    }
}
