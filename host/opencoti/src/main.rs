//! opencoti: an LLM inference server that is a plugin host.

mod bench;
mod boot;
mod channels;
mod chat;
mod cli;
mod config;
mod device;
mod fingerprint;
mod flags;
mod inspect;
mod kv;
mod lab;
mod measure;
mod memory;
mod plugins;
mod reference;
mod serve;
mod settings;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use tracing_subscriber::EnvFilter;

use cli::{Layers, Task};
use settings::{LogFormat, Settings};

fn main() -> ExitCode {
    match run(cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        // What was asked for was done, and a gate was failed.
        Ok(false) => ExitCode::from(3),
        Err(e) => {
            eprintln!("opencoti: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does what was asked for; whether all gates were passed, if there were any.
fn run(task: Task) -> Result<bool> {
    let done = match task {
        Task::Lab { layers, options, experiment } => return lab::run(&settings(&layers)?, &options, &experiment),
        Task::Serve { layers, print_curl } => {
            let settings = settings(&layers)?;
            log_to_stderr(&settings)?;
            serve::serve(settings, print_curl)
        }
        Task::Check { layers } => inspect::check(&settings(&layers)?),
        Task::Chat { layers, url, key, system } => chat::command(settings(&layers)?, url, key, system),
        Task::Plugins { layers, file: None, json } => plugins::list(&settings(&layers)?, json),
        Task::Plugins { layers, file: Some(file), json } => plugins::inspect(&settings(&layers)?, &file, json),
        Task::Model { layers, file, json } => inspect::model(&settings(&layers)?, &file, json),
        Task::Bench { layers, options } => {
            let settings = settings(&layers)?;
            bench::run(&settings, &options)
        }
        Task::HelpConfig { example, model } => {
            match example {
                true => print!("{}", reference::example(model.as_deref())),
                false => print!("{}", reference::page()),
            }
            Ok(())
        }
    };
    done.map(|()| true)
}

fn settings(layers: &Layers) -> Result<Settings> {
    Ok(config::merge(layers.config.as_deref(), |name| std::env::var(name).ok(), &layers.arguments)?)
}

fn log_to_stderr(settings: &Settings) -> Result<()> {
    let filter: EnvFilter = settings.log_level.parse().map_err(|e| {
        anyhow::anyhow!("`log.level`: found `{}`, expected a level or filter ({e})", settings.log_level)
    })?;
    // Colours are for terminals: a log in a file stays plain text.
    let colours = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr);
    match settings.log_format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
