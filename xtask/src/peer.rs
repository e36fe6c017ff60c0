//! `cargo xtask bench-peer`: opencoti and llama.cpp side by side, on one model, in one run.
//!
//! Both are programs that answer the same requests (docs/bench.md), so that every measurement of the one has one of the other
//! beside it in time; what counts is the median of their ratios.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{cache, models, python, run};

/// An interpreter that has the peer already, in place of one that is built.
const READY: &str = "OPENCOTI_PEER_PYTHON";
/// What the peer is built with: for this processor, and nothing but the library.
const BUILD: (&str, &str) = (
    "CMAKE_ARGS",
    "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
     -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_OPENSSL=OFF",
);
/// Starts of either program for memory and loading.
const STARTS: usize = 3;

/// What is run.
#[derive(Debug, PartialEq)]
struct Plan {
    model: String,
    threads: usize,
    rounds: usize,
    kv: Vec<String>,
    depths: Vec<usize>,
    batches: Vec<usize>,
    profile: String,
    json: Option<PathBuf>,
}

impl Plan {
    fn parse(args: &[String]) -> Result<Plan> {
        let mut plan = Plan {
            model: models::MODELS[0].name.to_owned(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            rounds: 5,
            kv: ["f16", "q8_0", "q4_0"].map(str::to_owned).into(),
            depths: vec![0, 2048, 8192],
            batches: vec![2, 4, 16],
            profile: "release".to_owned(),
            json: None,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if !arg.starts_with('-') {
                plan.model.clone_from(arg);
                continue;
            }
            let value = args.next().with_context(|| format!("{arg} needs a value"))?;
            let number = |text: &str| text.parse().with_context(|| format!("{arg}: `{text}` is no number"));
            let numbers = || value.split(',').filter(|t| !t.is_empty()).map(number).collect::<Result<Vec<usize>>>();
            match arg.as_str() {
                "--threads" => plan.threads = number(value)?.max(1),
                "--rounds" => plan.rounds = number(value)?.max(1),
                "--kv" => plan.kv = value.split(',').map(str::to_owned).collect(),
                "--depths" => plan.depths = numbers()?,
                "--batches" => plan.batches = numbers()?,
                "--profile" => plan.profile.clone_from(value),
                "--json" => plan.json = Some(value.into()),
                other => bail!(
                    "`{other}` is not understood, expected --threads, --rounds, --kv, --depths, --batches, --profile or --json"
                ),
            }
        }
        plan.depths.sort_unstable();
        Ok(plan)
    }

    /// The tests with their names: of one cache after the other, at ascending depths, so that sequences can grow.
    fn tests(&self) -> VecDeque<(String, Value)> {
        let mut tests = VecDeque::new();
        for kv in &self.kv {
            for &depth in &self.depths {
                // Prompts at great depth take the peer minutes with a small cache.
                if depth <= 2048 {
                    let request = json!({"test": "prefill", "tokens": 512, "depth": depth, "kv": kv});
                    tests.push_back((format!("prefill 512 at {depth}, {kv}"), request));
                }
                let request = json!({"test": "decode", "tokens": 64, "depth": depth, "kv": kv});
                tests.push_back((format!("decode at {depth}, {kv}"), request));
            }
        }
        let kv = self.kv.first().map_or("f16", String::as_str);
        for (test, depth, what) in [("batch", 256, "own"), ("shared", 2048, "shared")] {
            for &sequences in &self.batches {
                let request = json!({"test": test, "tokens": 32, "depth": depth, "sequences": sequences, "kv": kv});
                tests.push_back((format!("decode {sequences} x at {depth} {what}, {kv}"), request));
            }
        }
        tests
    }
}

/// A program that answers requests.
struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    ready: Value,
}

impl Worker {
    fn start(mut command: Command) -> Result<Worker> {
        let shown = format!("{command:?}").replace('"', "");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| format!("`{shown}` can't be started"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("a program without an output")?);
        let mut worker = Worker { child, input, output, ready: Value::Null };
        worker.ready = worker.read().with_context(|| format!("`{shown}`"))?;
        Ok(worker)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("it ended without an answer");
        }
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("it answers `{}`", line.trim()))?;
        match answer["error"].as_str() {
            Some(error) => bail!("{error}"),
            None => Ok(answer),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        let input = self.input.as_mut().context("it was told that there is no more")?;
        writeln!(input, "{request}")?;
        self.read()
    }

    /// Tokens a second.
    fn speed(&mut self, request: &Value) -> Result<f64> {
        let answer = self.ask(request)?;
        let number = |key: &str| answer[key].as_f64().with_context(|| format!("an answer without `{key}`"));
        Ok(number("tokens")? / number("seconds")?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends with its input.
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Both programs on one model.
struct Pair {
    binary: PathBuf,
    python: PathBuf,
    model: PathBuf,
    threads: usize,
}

impl Pair {
    /// `sequences` are the most that will be asked for.
    fn ours(&self, sequences: usize) -> Result<Worker> {
        let mut command = Command::new(&self.binary);
        command.args(["bench", "--interactive", "--no-floor", "--model"]).arg(&self.model);
        command.args(["--threads", &self.threads.to_string(), "--batches", &sequences.to_string()]);
        Worker::start(command)
    }

    fn peer(&self) -> Result<Worker> {
        let mut command = Command::new(&self.python);
        command.arg(cache::workspace().join("tests/python/peer.py")).arg(&self.model).arg(self.threads.to_string());
        Worker::start(command)
    }
}

/// A measure of both, and the ratios of neighbours.
struct Row {
    name: String,
    ours: Vec<f64>,
    peer: Vec<f64>,
    /// Whether more is better.
    more: bool,
}

impl Row {
    /// Above 1 where ours is better.
    fn ratios(&self) -> Vec<f64> {
        self.ours.iter().zip(&self.peer).map(|(ours, peer)| if self.more { ours / peer } else { peer / ours }).collect()
    }

    fn to_json(&self) -> Value {
        let spread = |values: &[f64]| {
            let sorted = sorted(values);
            json!({"median": median(values), "min": sorted.first(), "max": sorted.last(), "samples": values})
        };
        json!({
            "test": self.name,
            "ours": spread(&self.ours),
            "llama.cpp": spread(&self.peer),
            "ratio": spread(&self.ratios()),
        })
    }

    fn to_line(&self) -> String {
        let ratios = sorted(&self.ratios());
        let (least, most) = (ratios.first().copied().unwrap_or(f64::NAN), ratios.last().copied().unwrap_or(f64::NAN));
        format!(
            "| {} | {} | {} | {:.2} | {least:.2} to {most:.2} |",
            self.name,
            number(median(&self.ours)),
            number(median(&self.peer)),
            median(&ratios)
        )
    }
}

fn number(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median(values: &[f64]) -> f64 {
    let sorted = sorted(values);
    let n = sorted.len();
    match n {
        0 => f64::NAN,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// `cargo xtask bench-peer`.
pub fn bench(args: &[String]) -> Result<()> {
    let plan = Plan::parse(args)?;
    let model = run::resolve(&plan.model)?;
    let python = interpreter()?;
    let binary = run::build(&plan.profile, &run::DISTRIBUTION)?.join("opencoti");
    let pair = Pair { binary, python, model, threads: plan.threads };

    println!("| test | opencoti | llama.cpp | ratio | of single pairs |\n|---|---|---|---|---|");
    let mut rows = speeds(&pair, &plan)?;
    rows.extend(starts(&pair)?);
    let json = json!({
        "model": pair.model.display().to_string(),
        "threads": plan.threads,
        "rounds": plan.rounds,
        "peer": version(&pair.python)?,
        "rows": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
    });
    if let Some(path) = &plan.json {
        std::fs::write(path, format!("{json:#}\n")).with_context(|| format!("{} can't be written", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

/// An interpreter with the peer, built if need be.
fn interpreter() -> Result<PathBuf> {
    match std::env::var_os(READY) {
        Some(python) => Ok(python.into()),
        None => {
            eprintln!("building llama.cpp takes minutes, once");
            python::environment_with("tests/python/peer-requirements.txt", &[BUILD])
        }
    }
}

fn version(python: &Path) -> Result<String> {
    let code = "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)";
    let output = Command::new(python).args(["-c", code]).output().context("the peer's interpreter can't be started")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Tokens a second of every test.
fn speeds(pair: &Pair, plan: &Plan) -> Result<Vec<Row>> {
    let sequences = plan.batches.iter().max().copied().unwrap_or(1);
    let (mut ours, mut peer) = (pair.ours(sequences)?, pair.peer()?);
    let mut rows = Vec::new();
    for (name, request) in plan.tests() {
        let mut row = Row { name, ours: Vec::new(), peer: Vec::new(), more: true };
        // What comes before is computed now, and nothing is counted.
        alternate(&mut ours, &mut peer, &request, 0).with_context(|| row.name.clone())?;
        for round in 0..plan.rounds {
            let (a, b) = alternate(&mut ours, &mut peer, &request, round).with_context(|| row.name.clone())?;
            row.ours.push(a);
            row.peer.push(b);
        }
        println!("{}", row.to_line());
        rows.push(row);
    }
    Ok(rows)
}

/// Both speeds; who comes first changes from round to round.
fn alternate(ours: &mut Worker, peer: &mut Worker, request: &Value, round: usize) -> Result<(f64, f64)> {
    if round.is_multiple_of(2) {
        let first = ours.speed(request).context("opencoti")?;
        return Ok((first, peer.speed(request).context("llama.cpp")?));
    }
    let first = peer.speed(request).context("llama.cpp")?;
    Ok((ours.speed(request).context("opencoti")?, first))
}

/// Seconds from the start of loading to the first token, and memory for a prompt and some tokens at depth 2048.
fn starts(pair: &Pair) -> Result<[Row; 2]> {
    let row = |name: &str| Row { name: name.to_owned(), ours: Vec::new(), peer: Vec::new(), more: false };
    let mut loading = row("loading and first token, s");
    let mut memory = row("peak memory, MiB");
    for _ in 0..STARTS {
        let (seconds, mib) = start(pair.ours(1)?)?;
        loading.ours.push(seconds);
        memory.ours.push(mib);
        let (seconds, mib) = start(pair.peer()?)?;
        loading.peer.push(seconds);
        memory.peer.push(mib);
    }
    println!("{}\n{}", loading.to_line(), memory.to_line());
    Ok([loading, memory])
}

fn start(mut worker: Worker) -> Result<(f64, f64)> {
    let first = worker.ask(&json!({"test": "decode", "tokens": 1}))?;
    worker.ask(&json!({"test": "prefill", "tokens": 512, "depth": 2048}))?;
    let last = worker.ask(&json!({"test": "decode", "tokens": 16, "depth": 2048}))?;
    let seconds = worker.ready["load_seconds"].as_f64().zip(first["seconds"].as_f64());
    let (load, first) = seconds.context("an answer without its seconds")?;
    let peak = last["peak_bytes"].as_f64().context("an answer without its memory")?;
    // What the interpreter takes is not the peer's.
    let base = worker.ready["base_bytes"].as_f64().unwrap_or(0.0);
    Ok((load + first, (peak - base) / f64::from(1 << 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(args: &[&str]) -> Result<Plan> {
        Plan::parse(&args.iter().map(|&a| a.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn tests_of_one_cache_follow_each_other_at_ascending_depths() {
        let plan =
            plan(&["m.gguf", "--kv", "f16,q4_0", "--depths", "8192,0", "--batches", "2", "--threads", "3"]).unwrap();
        assert_eq!((plan.model.as_str(), plan.threads), ("m.gguf", 3));
        let names: Vec<String> = plan.tests().into_iter().map(|(name, _)| name).collect();
        let expected = [
            "prefill 512 at 0, f16",
            "decode at 0, f16",
            "decode at 8192, f16",
            "prefill 512 at 0, q4_0",
            "decode at 0, q4_0",
            "decode at 8192, q4_0",
            "decode 2 x at 256 own, f16",
            "decode 2 x at 2048 shared, f16",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        assert!(plan(&["--speed", "1"]).unwrap_err().to_string().contains("`--speed` is not understood"));
        assert!(plan(&["--threads", "x"]).unwrap_err().to_string().contains("`x` is no number"));
        assert!(plan(&["--rounds"]).unwrap_err().to_string().contains("--rounds needs a value"));
    }

    #[test]
    fn ratios_are_of_neighbours_and_above_one_where_ours_is_better() {
        let row = |more| Row { name: String::new(), ours: vec![2.0, 9.0, 4.0], peer: vec![1.0, 3.0, 1.0], more };
        assert_eq!(median(&row(true).ratios()), 3.0);
        assert_eq!(median(&row(false).ratios()), 1.0 / 3.0);
        assert_eq!(median(&[1.0, 2.0]), 1.5);
    }

    #[test]
    fn a_program_that_ends_or_refuses_is_an_error_with_its_words() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Worker::start(command)
        };
        let mut worker = shell("echo '{\"ready\": true}'; read line; echo '{\"error\": \"too deep\"}'").unwrap();
        assert_eq!(worker.speed(&json!({})).unwrap_err().to_string(), "too deep");
        assert!(format!("{:#}", shell("true").err().unwrap()).contains("ended without an answer"));
        assert!(format!("{:#}", shell("echo hello").err().unwrap()).contains("answers `hello`"));
        let mut worker = shell("echo '{}'; read line; echo '{\"tokens\": 6, \"seconds\": 2}'").unwrap();
        assert_eq!(worker.speed(&json!({})).unwrap(), 3.0);
    }
}
