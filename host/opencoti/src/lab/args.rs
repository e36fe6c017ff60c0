//! Arguments of `opencoti lab`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Command, value_parser};

use super::codecs::With;
use super::needles::Task;
use super::text::Source;
use super::{Experiment, Options, calibrate, codecs, kld, logits, niah, sweep};
use crate::bench::args::{as_json, count, kv, list, numbers, outputs, size, sizes, switch};

/// The command with an experiment each; `layers` adds the settings' flags.
pub fn command(layers: fn(Command) -> Command) -> Command {
    let experiment = |name: &'static str, about: &'static str| common(layers(Command::new(name).about(about)));
    Command::new("lab")
        .about("Measure how faithful codecs are")
        .long_about(
            "Measure how faithful codecs are, on any model and text, against a reference. Ends with a verdict per gate; the \
             exit status is 3 when one was failed. docs/lab.md tells what each number means.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            experiment("kld", "Divergence from the reference, teacher-forced, token by token as decoding reads the cache")
                .args(judged())
                .arg(reference())
                .args(passages()),
        )
        .subcommand(
            experiment("ppl", "Perplexity by the procedure of llama.cpp's tool: the second half of every passage counts")
                .args(judged())
                .arg(reference())
                .arg(count("tokens", "Tokens of a passage", "512", 4))
                .arg(count("passages", "Passages; 0 takes all that the text has", "0", 0))
                .arg(count("rows", "Tokens of a scored step; 1 reads the cache as decoding does", "64", 1)),
        )
        .subcommand(
            experiment("niah", "Whether facts in a long text are found again: one, one of many, behind another")
                .args(judged())
                .arg(reference())
                .arg(
                    list("tasks", "TASK,…", "What is asked", "single,keys,hops")
                        .value_parser(clap::builder::PossibleValuesParser::new(Task::ALL.map(Task::name))),
                )
                .arg(numbers("lengths", "Tokens of a text", "4096", 256))
                .arg(numbers("depths", "Where the facts are, in percent of the text", "10,50,90", 0))
                .arg(count("trials", "Texts of each kind, with other facts", "1", 1)),
        )
        .subcommand(
            experiment("sweep", "Every codec that is loaded, and which none surpasses in size and divergence")
                .args(judged())
                .arg(reference())
                .args(passages())
                .arg(switch("sides", "Also try each codec for keys alone and for values alone")),
        )
        .subcommand(
            experiment("codecs", "Error of what codecs store, on the keys, values and queries of every layer")
                .args(judged())
                .arg(count("tokens", "Tokens of the text; whole pages of 128 count", "2048", 128))
                .arg(count("queries", "Positions whose queries are asked", "64", 1))
                .arg(count("sink", "Leading tokens that stay exact, as a cache with a sink keeps them", "0", 0))
                .arg(file("table", "Table of `lab calibrate` with which keys and values are prepared"))
                .arg(with()),
        )
        .subcommand(
            layers(Command::new("calibrate").about("Write a table of the means and factors of a model's keys and values"))
                .args(source())
                .group(one_source())
                .arg(count("tokens", "Tokens of the text", "4096", 16))
                .arg(file("out", "The table's file").required(true)),
        )
        .subcommand(
            experiment("logits", "Write the logits of every token, for comparisons with other engines")
                .arg(file("out", "File for the logits: f32, little-endian, a row for each token").required(true))
                .arg(count("tokens", "Leading tokens that are run; 0 takes all", "0", 0))
                .arg(count("rows", "Tokens of a step", "64", 1)),
        )
}

/// Reads the experiment, what all are told, and where its flags are.
pub fn read(matches: &ArgMatches) -> (&ArgMatches, Options, Experiment) {
    let (name, m) = matches.subcommand().unwrap_or(("", matches));
    let reference = || m.get_one::<String>("reference").cloned().unwrap_or_default();
    let passages = || kld::Options {
        name: kld::Name::Kld,
        reference: reference(),
        tokens: size(m, "tokens"),
        scored: size(m, "scored"),
        passages: size(m, "passages"),
        together: size(m, "passages"),
        rows: size(m, "rows"),
    };
    let experiment = match name {
        "kld" => Experiment::Kld(passages()),
        "sweep" => Experiment::Sweep(sweep::Options { kld: passages(), sides: m.get_flag("sides") }),
        "niah" => {
            let names: Vec<&String> = m.get_many("tasks").into_iter().flatten().collect();
            Experiment::Niah(niah::Options {
                reference: reference(),
                tasks: Task::ALL.into_iter().filter(|task| names.iter().any(|name| *name == task.name())).collect(),
                lengths: sizes(m, "lengths"),
                depths: sizes(m, "depths"),
                trials: size(m, "trials"),
            })
        }
        "ppl" => {
            let tokens = size(m, "tokens");
            Experiment::Kld(kld::Options {
                name: kld::Name::Ppl,
                reference: reference(),
                tokens,
                scored: tokens - 1 - tokens / 2,
                passages: size(m, "passages"),
                together: 1,
                rows: size(m, "rows"),
            })
        }
        "codecs" => Experiment::Codecs(codecs::Options {
            tokens: size(m, "tokens"),
            queries: size(m, "queries"),
            sink: size(m, "sink"),
            table: m.get_one("table").cloned(),
            with: match m.get_one::<String>("with").map(String::as_str) {
                Some("mean") => With::Mean,
                Some("scale") => With::Scale,
                _ => With::Both,
            },
        }),
        "calibrate" => Experiment::Calibrate(calibrate::Options {
            out: m.get_one("out").cloned().unwrap_or_default(),
            tokens: size(m, "tokens"),
        }),
        _ => Experiment::Logits(logits::Options {
            out: m.get_one("out").cloned().unwrap_or_default(),
            tokens: size(m, "tokens"),
            rows: size(m, "rows"),
        }),
    };
    (m, options(m), experiment)
}

fn options(m: &ArgMatches) -> Options {
    let path = |name: &str| m.try_get_one::<PathBuf>(name).ok().flatten().cloned();
    let text = path("ids").map(Source::Ids);
    Options {
        kv: m.try_get_many::<String>("kv").ok().flatten().into_iter().flatten().cloned().collect(),
        text: text.unwrap_or_else(|| Source::Text(path("text").unwrap_or_default())),
        gates: m.try_get_many::<String>("gate").ok().flatten().into_iter().flatten().cloned().collect(),
        as_json: m.try_contains_id("format").is_ok() && as_json(m),
        json: path("json"),
        svg: path("svg"),
    }
}

fn common(command: Command) -> Command {
    command.arg(kv("Pairs of codecs to measure")).args(source()).group(one_source())
}

/// The tokens to run.
fn source() -> [Arg; 2] {
    [file("text", "Text to run, in UTF-8"), file("ids", "Token ids to run, a JSON array")]
}

fn one_source() -> ArgGroup {
    ArgGroup::new("source").args(["text", "ids"]).required(true)
}

fn with() -> Arg {
    let help = "What is taken of the table: the mean of keys, the factors of channels";
    Arg::new("with")
        .long("with")
        .value_name("WHAT")
        .value_parser(["mean", "scale", "both"])
        .default_value("both")
        .help(help)
}

/// Arguments of experiments with results to be judged.
fn judged() -> Vec<Arg> {
    let gate = Arg::new("gate")
        .long("gate")
        .value_name("CONDITION")
        .action(ArgAction::Append)
        .help("What must hold, such as kld<=0.01 or kvarn4.kld<=0.5*q4_0.kld; once for each condition");
    outputs().into_iter().chain([gate]).collect()
}

/// Sizes of what is scored.
fn passages() -> [Arg; 4] {
    [
        count("tokens", "Tokens of a passage", "4096", 2),
        count("scored", "Of these, the last ones that are scored; those before are context", "1024", 1),
        count("passages", "Passages, which run at the same time", "1", 1),
        count("rows", "Tokens of a passage in a scored step; 1 reads the cache as decoding does", "1", 1),
    ]
}

fn reference() -> Arg {
    let help = "Pair of codecs that the others are compared with";
    Arg::new("reference").long("reference").value_name("K[:V]").default_value("f16").help(help)
}

fn file(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("FILE").value_parser(value_parser!(PathBuf)).help(help)
}
