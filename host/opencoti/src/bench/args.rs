//! Arguments of `opencoti bench`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use super::{Kind, Options};
use crate::measure::codecs::SYNTAX;

/// Adds the arguments of a bench.
pub fn add(command: Command) -> Command {
    let kinds = Kind::ALL.map(Kind::name);
    command
        .arg(
            list("tests", "KIND,…", "Kinds of tests", "prefill,decode,mixed,batch,shared")
                .value_parser(clap::builder::PossibleValuesParser::new(kinds)),
        )
        .arg(kv("Pairs of codecs to measure in turn"))
        .arg(count("prompt", "Tokens of a prompt", "512", 1))
        .arg(count("generate", "Tokens that a sequence decodes in one measurement", "64", 1))
        .arg(numbers("depths", "Tokens before those that are measured, in tests of one sequence", "0,2048", 0))
        .arg(numbers("batches", "Numbers of sequences that decode together", "2,4,16", 1))
        .arg(count("batch-depth", "Tokens that each sequence of a batch has of its own", "256", 0))
        .arg(count("prefix", "Tokens of the prefix that sequences share", "2048", 1))
        .arg(count("repeat", "Measurements of each test", "5", 1))
        .arg(switch("no-floor", "Don't measure the memory's bandwidth, which takes 512 MiB"))
        .args(outputs())
        .arg(switch(
            "interactive",
            "Read tests from standard input, a JSON object a line, and answer each (docs/bench.md)",
        ))
}

/// Reads them.
pub fn read(matches: &ArgMatches) -> Options {
    let names = matches.get_many::<String>("tests").into_iter().flatten();
    Options {
        kinds: names.filter_map(|name| Kind::of(name)).collect(),
        kv: texts(matches, "kv"),
        prompt: size(matches, "prompt"),
        generate: size(matches, "generate"),
        depths: sizes(matches, "depths"),
        batches: sizes(matches, "batches"),
        batch_depth: size(matches, "batch-depth"),
        prefix: size(matches, "prefix"),
        repeat: size(matches, "repeat"),
        floor: !matches.get_flag("no-floor"),
        as_json: as_json(matches),
        json: matches.get_one("json").cloned(),
        svg: matches.get_one("svg").cloned(),
        interactive: matches.get_flag("interactive"),
    }
}

/// Longest that a count may be: beyond it, nothing would end.
const MOST: i64 = 1 << 20;

/// Pairs of codecs.
pub fn kv(help: &str) -> Arg {
    Arg::new("kv")
        .long("kv")
        .value_name("K[:V],…")
        .value_delimiter(',')
        .action(ArgAction::Append)
        .help(format!("{help}; a pair is {SYNTAX} [default: that of --cache-type-k and --cache-type-v]"))
}

/// Where results go.
pub fn outputs() -> [Arg; 3] {
    let file = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("FILE").value_parser(value_parser!(PathBuf)).help(help)
    };
    let format = Arg::new("format").long("format").value_name("FORM").value_parser(["table", "json"]);
    [
        format.default_value("table").help("What is printed"),
        file("json", "Write the results as JSON, too"),
        file("svg", "Write a plot, too"),
    ]
}

/// Whether JSON is printed.
pub fn as_json(matches: &ArgMatches) -> bool {
    matches.get_one::<String>("format").is_some_and(|format| format == "json")
}

/// One number from `least` on.
pub fn count(name: &'static str, help: &'static str, default: &'static str, least: i64) -> Arg {
    number(Arg::new(name).long(name).value_name("N").help(help).default_value(default), least)
}

/// Numbers from `least` on, with commas between them.
pub fn numbers(name: &'static str, help: &'static str, default: &'static str, least: i64) -> Arg {
    number(list(name, "N,…", help, default), least)
}

fn number(arg: Arg, least: i64) -> Arg {
    arg.value_parser(value_parser!(i64).range(least..=MOST))
}

/// Words with commas between them.
pub fn list(name: &'static str, label: &'static str, help: &'static str, default: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(label).value_delimiter(',').help(help).default_value(default)
}

/// A switch.
pub fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

/// Texts of a list; none when it was not given.
pub fn texts(matches: &ArgMatches, name: &str) -> Vec<String> {
    matches.get_many::<String>(name).into_iter().flatten().cloned().collect()
}

/// A number of [`count`].
pub fn size(matches: &ArgMatches, name: &str) -> usize {
    sizes(matches, name).first().copied().unwrap_or(0)
}

/// Numbers of [`numbers`].
pub fn sizes(matches: &ArgMatches, name: &str) -> Vec<usize> {
    let values = matches.get_many::<i64>(name).into_iter().flatten();
    values.map(|&n| usize::try_from(n).unwrap_or(0)).collect()
}
