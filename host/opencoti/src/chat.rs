//! `opencoti chat`: a terminal chat over the server's own HTTP surface, streamed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::serve;
use crate::settings::Settings;

const HELP: &str = "/clear forgets the conversation, /system TEXT sets the system text, /quit ends.";

/// `opencoti chat`: with the server at `url`, or with one of our own on a free port.
pub fn command(mut settings: Settings, url: Option<String>, key: Option<String>, system: Option<String>) -> Result<()> {
    if let Some(url) = url {
        return Chat::new(&url, key, system)?.run();
    }
    if settings.model.is_none() {
        bail!("give `--url` of a running server, or a model with `--model FILE` or a config");
    }
    (settings.host, settings.port) = ("127.0.0.1".to_owned(), 0);
    (settings.api_keys, settings.api_key_file) = (Vec::new(), None);
    eprintln!("loading {} ...", settings.model.as_deref().unwrap_or_else(|| Path::new("")).display());
    let runtime = serve::runtime()?;
    let server = runtime.block_on(serve::bind(&settings))?;
    let (address, control) = (serve::address(&settings, &server), server.control());
    let serving = runtime.spawn(server.serve(std::future::pending()));
    serve::load(&settings, &control, &address, false)?;
    let ended = Chat::new(&address, None, system)?.run();
    control.shutdown();
    runtime.block_on(serving)??;
    ended
}

/// A conversation with a server.
pub struct Chat {
    client: reqwest::blocking::Client,
    url: String,
    key: Option<String>,
    messages: Vec<Value>,
}

impl Chat {
    /// A conversation with the server at `url` (without a trailing slash).
    pub fn new(url: &str, key: Option<String>, system: Option<String>) -> Result<Self> {
        let client = reqwest::blocking::Client::builder().timeout(None).build()?;
        let mut chat = Chat { client, url: url.trim_end_matches('/').to_owned(), key, messages: Vec::new() };
        if let Some(system) = system {
            chat.set_system(&system);
        }
        Ok(chat)
    }

    fn set_system(&mut self, text: &str) {
        self.messages.retain(|m| m["role"] != "system");
        self.messages.insert(0, json!({"role": "system", "content": text}));
    }

    /// Reads lines until the user ends it.
    pub fn run(mut self) -> Result<()> {
        println!("Chatting with {}. {HELP}", self.url);
        let mut editor = rustyline::DefaultEditor::new()?;
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            editor.add_history_entry(line)?;
            match line.split_once(' ').map_or((line, ""), |(a, b)| (a, b)) {
                ("/quit" | "/exit", _) => return Ok(()),
                ("/clear", _) => self.messages.retain(|m| m["role"] == "system"),
                ("/system", text) => self.set_system(text),
                (command, _) if command.starts_with('/') => println!("`{command}` is no command. {HELP}"),
                _ => {
                    if let Err(e) = self.say(line, &mut std::io::stdout()) {
                        self.messages.pop();
                        eprintln!("{e:#}");
                    }
                }
            }
        }
    }

    /// Sends a user message and prints the answer as it comes.
    fn say(&mut self, text: &str, out: &mut impl Write) -> Result<()> {
        self.messages.push(json!({"role": "user", "content": text}));
        let mut request = self
            .client
            .post(format!("{}/v1/chat/completions", self.url))
            .json(&json!({"messages": self.messages, "stream": true, "timings_per_token": false}));
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let answer = request.send().with_context(|| format!("no server answers at {}", self.url))?;
        let status = answer.status();
        if !status.is_success() {
            let body: Value = answer.json().unwrap_or_default();
            bail!("{status}: {}", body["error"]["message"].as_str().unwrap_or("no reason given"));
        }
        let said = print_stream(BufReader::new(answer), out)?;
        self.messages.push(json!({"role": "assistant", "content": said}));
        Ok(())
    }
}

/// Prints the content of a stream of server-sent events and returns it.
fn print_stream(stream: impl BufRead, out: &mut impl Write) -> Result<String> {
    let mut said = String::new();
    for line in stream.lines() {
        let line = line.context("the stream broke off")?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            writeln!(out)?;
            return Ok(said);
        }
        let event: Value = serde_json::from_str(data).context("the stream holds something that is no JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("{message}");
        }
        let delta = &event["choices"][0]["delta"];
        for part in [&delta["reasoning_content"], &delta["content"]] {
            if let Some(text) = part.as_str() {
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
        }
        said.push_str(delta["content"].as_str().unwrap_or(""));
    }
    bail!("the stream ended before the answer did")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_printed_as_it_comes_and_pings_are_skipped() {
        let stream = ":\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"Hel\"}}]}\n\n:\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"lo\"}}]}\n\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n";
        let mut out = Vec::new();
        assert_eq!(print_stream(stream.as_bytes(), &mut out).unwrap(), "Hello");
        assert_eq!(out, b"Hello\n");
    }

    #[test]
    fn an_error_in_the_stream_is_an_error() {
        let stream = "data: {\"error\":{\"message\":\"the cache is full\"}}\n\n";
        let error = print_stream(stream.as_bytes(), &mut Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "the cache is full");
        assert!(print_stream(&b"data: {}\n"[..], &mut Vec::new()).is_err());
    }
}
