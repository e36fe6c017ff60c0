//! `lab niah`: whether facts in a long text are found again, by depth.
//!
//! A fact counts as found when at every token of the answer that token is the most probable one: greedy decoding would have
//! said it. Answers are read token by token from the compressed cache.

use anyhow::{Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_registry::Registry;
use serde_json::{Value, json};

use super::gates::{Finding, Metrics};
use super::lockstep::{self, Pace, Track};
use super::needles::{Haystack, MOST_DEPTHS, Maker, Question, Task};
use super::report::{self, Column, Shape, percent, plain};
use super::{Options as Common, exact, kld, text};
use crate::measure::codecs::{self, Pair};
use crate::measure::rig::{Rig, Size};
use crate::measure::stats;
use crate::measure::table::Table;
use crate::settings::Settings;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The pair that others are compared with.
    pub reference: String,
    /// What is asked.
    pub tasks: Vec<Task>,
    /// Tokens of a haystack.
    pub lengths: Vec<usize>,
    /// Where facts are, in percent.
    pub depths: Vec<usize>,
    /// Haystacks of each kind, with other numbers.
    pub trials: usize,
}

const COLUMNS: [Column; 9] = [
    plain("bits", "bits/value"),
    plain("bytes", "bytes/token"),
    percent("recall", "found %"),
    plain("recall_ratio", "of reference"),
    percent("single", "single %"),
    percent("keys", "keys %"),
    percent("hops", "hops %"),
    plain("surprise", "nats/token"),
    plain("kld", "KLD mean"),
];

const SHAPE: Shape = Shape {
    name: "niah",
    columns: &COLUMNS,
    plotted: plain("kld", "mean KLD at answers, nats"),
    gates: &["recall_ratio>=0.9"],
};

/// Room for a question behind a haystack.
const QUESTION: usize = 128;

/// What became of one question.
struct Outcome {
    task: Task,
    length: usize,
    depth: usize,
    found: bool,
    surprise: f64,
    kld: f64,
}

/// Runs it; whether every gate was passed.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    if own.depths.len() > MOST_DEPTHS || own.depths.iter().any(|&depth| depth > 100) {
        bail!("`--depths` has {:?}, expected up to {MOST_DEPTHS} numbers from 0 to 100", own.depths);
    }
    let mut pairs = kld::with_reference(settings, &own.reference, codecs::pairs(settings, &common.kv)?)?;
    let gates = SHAPE.gates(common, &pairs)?;
    let longest = own.lengths.iter().max().copied().unwrap_or(0) + QUESTION;
    let size = Size { rows: settings.batch_size.max(1) as usize, outputs: 1, context: longest };
    let mut rig = Rig::load(settings, size, |model| Box::new(Attention::new(&model.graph)))?;
    let exact = exact::equalise(&mut pairs, registry, &rig.model.graph)?;
    let text = common.text.tokens(&rig.model.tokenizer)?;

    // The haystack, and a fork of it that begins in a page of its own.
    let room = (longest.div_ceil(PAGE_TOKENS) + QUESTION.div_ceil(PAGE_TOKENS) + 1) * PAGE_TOKENS;
    let track = |pair| Ok(Track::new(&rig, rig.cache(pair, registry, room, 2)?));
    let mut tracks: Vec<Track> = pairs.iter().map(track).collect::<Result<_>>()?;
    let mut outcomes: Vec<Vec<Outcome>> = pairs.iter().map(|_| Vec::new()).collect();
    for (&length, trial) in own.lengths.iter().flat_map(|length| (0..own.trials).map(move |trial| (length, trial))) {
        let tokenizer = rig.model.tokenizer.clone();
        let begin = text::begin(&tokenizer);
        let maker = Maker { tokenizer: &tokenizer, text: &text, begin, length, depths: &own.depths, trial };
        for &task in &own.tasks {
            for haystack in maker.haystacks(task)? {
                ask(&mut rig, &mut tracks, &haystack, &mut outcomes)?;
            }
            eprintln!("{} at {length} tokens, trial {}", task.name(), trial + 1);
        }
    }
    let findings = findings(&pairs, &tracks, &outcomes);
    let facts = json!({
        "model": settings.model.as_ref().map(|path| path.display().to_string()),
        "lengths": own.lengths,
        "trials": own.trials,
        "exact_tokens": exact,
        "questions": pairs.iter().zip(&outcomes).map(|(pair, o)| questions(pair, o)).collect::<Vec<_>>(),
    });
    if !common.as_json {
        println!("{}", by_depth(&pairs, &outcomes, own));
    }
    report::show(&SHAPE, common, facts, &findings, &gates)
}

/// Asks every question about a haystack of every track.
fn ask(rig: &mut Rig, tracks: &mut [Track], haystack: &Haystack, outcomes: &mut [Vec<Outcome>]) -> Result<()> {
    for track in tracks.iter_mut() {
        track.set_prefix(rig, &haystack.tokens)?;
    }
    for Question { depth, tokens, answer } in &haystack.questions {
        if tokens.len() > QUESTION {
            bail!("a question takes {} tokens in this vocabulary, expected at most {QUESTION}", tokens.len());
        }
        let pace = Pace { first: tokens.len() - 1 - answer, rows: 1 };
        lockstep::run(rig, tracks, std::slice::from_ref(tokens), pace)?;
        for (track, outcomes) in tracks.iter_mut().zip(outcomes.iter_mut()) {
            let tally = std::mem::take(&mut track.tally);
            outcomes.push(Outcome {
                task: haystack.task,
                length: haystack.tokens.len(),
                depth: *depth,
                found: tally.is_said(),
                surprise: tally.surprise(),
                kld: tally.kld(),
            });
        }
    }
    Ok(())
}

fn findings(pairs: &[Pair], tracks: &[Track], outcomes: &[Vec<Outcome>]) -> Vec<Finding> {
    let reference = recall(&outcomes[0], |_| true);
    let finding = |i: usize| {
        let own = &outcomes[i];
        let mean = |value: fn(&Outcome) -> f64| stats::mean(&own.iter().map(value).collect::<Vec<_>>());
        let of_task = |task: Task| recall(own, |o| o.task == task);
        let metrics = Metrics::from([
            ("bits", tracks[i].bits),
            ("bytes", tracks[i].bytes),
            ("recall", recall(own, |_| true)),
            ("recall_ratio", recall(own, |_| true) / reference),
            ("single", of_task(Task::Single)),
            ("keys", of_task(Task::Keys)),
            ("hops", of_task(Task::Hops)),
            ("surprise", mean(|o| o.surprise)),
            ("kld", mean(|o| o.kld)),
        ]);
        Finding { label: pairs[i].label.clone(), is_reference: i == 0, metrics }
    };
    (0..pairs.len()).map(finding).collect()
}

/// Share of questions whose answer was found; NaN of none.
fn recall(outcomes: &[Outcome], which: impl Fn(&Outcome) -> bool) -> f64 {
    let asked: Vec<f64> = outcomes.iter().filter(|o| which(o)).map(|o| f64::from(u8::from(o.found))).collect();
    stats::mean(&asked)
}

fn questions(pair: &Pair, outcomes: &[Outcome]) -> Value {
    let question = |o: &Outcome| {
        json!({
            "task": o.task.name(),
            "tokens": o.length,
            "depth": o.depth,
            "found": o.found,
            "surprise": o.surprise,
            "kld": o.kld,
        })
    };
    json!({"kv": pair.label, "outcomes": outcomes.iter().map(question).collect::<Vec<_>>()})
}

/// Answers found at each length and depth, all tasks and trials together.
fn by_depth(pairs: &[Pair], outcomes: &[Vec<Outcome>], own: &Options) -> Table {
    let depths: Vec<String> = own.depths.iter().map(|depth| format!("{depth} %")).collect();
    let titles: Vec<&str> = ["KV", "tokens"].into_iter().chain(depths.iter().map(String::as_str)).collect();
    let mut table = Table::new(&titles);
    for (pair, outcomes) in pairs.iter().zip(outcomes) {
        for &length in &own.lengths {
            let cell = |&depth: &usize| {
                let here: Vec<&Outcome> = outcomes.iter().filter(|o| (o.length, o.depth) == (length, depth)).collect();
                format!("{} of {}", here.iter().filter(|o| o.found).count(), here.len())
            };
            let start = [pair.label.clone(), length.to_string()];
            table.row(start.into_iter().chain(own.depths.iter().map(cell)).collect());
        }
    }
    table
}
