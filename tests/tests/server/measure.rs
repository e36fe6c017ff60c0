//! `opencoti bench` and `opencoti lab` on a made-up model: what they measure and write, and what they refuse.

use std::io::Write;
use std::process::{Output, Stdio};

use opencoti_tests::server::{Site, opencoti, refusal, text};
use serde_json::{Value, json};

/// A folder with a model and a text, and what every command line needs.
struct Lab {
    site: Site,
}

impl Lab {
    fn new() -> Lab {
        let site = Site::new("");
        std::fs::write(site.path("text"), "the inn and the barn stand in the rain. ".repeat(20)).expect("the text");
        Lab { site }
    }

    fn path(&self, name: &str) -> String {
        text(&self.site.path(name))
    }

    fn command(&self, words: &[&str], args: &[&str]) -> std::process::Command {
        let mut line: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        line.extend(["--model".to_owned(), self.path("tiny.gguf"), "--plugin-cache".to_owned(), self.path("plugins")]);
        line.extend(["--threads", "1", "--batch-size", "32"].map(str::to_owned));
        line.extend(args.iter().map(|&arg| arg.to_owned()));
        opencoti(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn run(&self, words: &[&str], args: &[&str]) -> Output {
        self.command(words, args).output().expect("the program runs")
    }

    /// A lab's experiment on the text: its exit status, and its JSON.
    #[track_caller]
    fn experiment(&self, name: &str, args: &[&str]) -> (Option<i32>, Value) {
        let text = self.path("text");
        let args: Vec<&str> = ["--text", &text, "--format", "json"].into_iter().chain(args.iter().copied()).collect();
        let output = self.run(&["lab", name], &args);
        let found = serde_json::from_slice(&output.stdout);
        (output.status.code(), found.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr))))
    }
}

fn finding<'a>(found: &'a Value, kv: &str) -> &'a Value {
    let mut findings = found["findings"].as_array().expect("findings").iter();
    findings.find(|f| f["kv"] == kv).unwrap_or_else(|| panic!("no {kv} in {found}"))
}

#[test]
fn a_bench_runs_every_kind_of_test_and_writes_what_it_is_told_to() {
    let lab = Lab::new();
    let (json, svg) = (lab.path("bench.json"), lab.path("bench.svg"));
    let sizes = ["--prompt", "40", "--generate", "3", "--depths", "130,0", "--batches", "2", "--batch-depth", "10"];
    let rest =
        ["--prefix", "140", "--repeat", "3", "--no-floor", "--kv", "f16,q8_0:q4_0", "--json", &json, "--svg", &svg];
    let output = lab.run(&["bench"], &[&sizes[..], &rest[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("| decode 2 x @ 140 shared ") && table.contains("q8_0:q4_0"), "{table}");

    let found: Value = serde_json::from_str(&std::fs::read_to_string(json).expect("the JSON")).expect("is valid");
    let tests = found["tests"].as_array().expect("tests");
    // Three kinds at two depths, and two of batches, each for two pairs.
    assert_eq!(tests.len(), 16);
    for test in tests {
        assert_eq!(test["samples"].as_array().map(Vec::len), Some(3), "{test}");
        assert!(test["tokens_per_second"]["median"].as_f64() > Some(0.0), "{test}");
        assert_eq!(test["share_of_floor"], Value::Null, "without a floor: {test}");
    }
    let of = |name: &str, kv: &str| tests.iter().find(|t| t["name"] == name && t["kv"] == kv).expect("the test");
    // Two layers of two heads of 32: K in q8_0 is 34 bytes for 32 values, V in q4_0 is 18.
    assert_eq!(of("decode @ 0", "f16")["kv_bytes_per_token"], 512.0);
    assert_eq!(of("decode @ 0", "q8_0:q4_0")["kv_bytes_per_token"], 208.0);
    let bytes = |name, kv| of(name, kv)["bytes_per_step"].as_f64().expect("a number");
    let deeper = bytes("decode @ 130", "f16") - bytes("decode @ 0", "f16");
    assert!((deeper - 130.0 * 512.0).abs() < 1.0, "a token reads what is before it: {deeper}");
    // The prefix counts once, however many share it.
    let weights = found["weight_bytes_per_token"].as_f64().expect("a number");
    let shared = bytes("decode 2 x @ 140 shared", "f16") - weights;
    assert!(shared > 140.0 * 512.0 && shared < 150.0 * 512.0, "{shared}");
    assert!(std::fs::read_to_string(svg).expect("the plot").contains("Decoding, many sequences"));
}

#[test]
fn a_bench_answers_requests_one_by_one() {
    let lab = Lab::new();
    let mut command = lab.command(&["bench", "--interactive", "--no-floor"], &[]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    let requests = [
        json!({"test": "decode", "tokens": 2, "depth": 150}),
        json!({"test": "decode", "tokens": 2, "depth": 200, "kv": "q8_0"}),
        json!({"test": "shared", "tokens": 2, "depth": 20, "sequences": 3, "kv": "q8_0"}),
        json!({"test": "prefill", "tokens": 50, "depth": 20, "kv": "nothing"}),
        json!({"test": "prefill", "tokens": 50, "depth": 20}),
    ];
    let mut input = child.stdin.take().expect("its input");
    requests.iter().for_each(|request| writeln!(input, "{request}").expect("sent"));
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let answers: Vec<Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    assert_eq!(answers.len(), 6, "{answers:?}");
    assert_eq!(answers[0]["ready"], true);
    let tokens: Vec<&Value> = answers[1..].iter().map(|a| &a["tokens"]).collect();
    assert_eq!(tokens, [&json!(2), &json!(2), &json!(6), &Value::Null, &json!(50)]);
    assert!(answers[4]["error"].as_str().is_some_and(|e| e.contains("`nothing`")), "{answers:?}");
}

#[test]
fn a_cache_that_is_the_reference_does_not_diverge_and_a_smaller_one_does() {
    let lab = Lab::new();
    let args = ["--tokens", "100", "--scored", "30", "--kv", "bf16,q8_0,q4_0,q4_0+rotation=none", "--gate", "kld<0.5"];
    let (status, found) = lab.experiment("kld", &args);
    assert_eq!(status, Some(0), "{found}");
    assert_eq!((&found["passed"], &found["positions"]), (&json!(true), &json!(30)));
    let reference = finding(&found, "f16");
    assert_eq!(
        (&reference["kld"], &reference["top1"], &reference["ppl_ratio"]),
        (&json!(0.0), &json!(1.0), &json!(1.0))
    );
    let kld = |kv: &str| finding(&found, kv)["kld"].as_f64().expect("a number");
    assert!(kld("bf16") > 0.0 && kld("bf16") < kld("q4_0"), "{found}");
    assert!(kld("q8_0") > 0.0 && kld("q8_0") < kld("q4_0"), "{found}");
    assert_ne!(kld("q4_0"), kld("q4_0+rotation=none"), "options reach the codec");
    let bits: Vec<&Value> = ["f16", "q8_0", "q4_0"].map(|kv| &finding(&found, kv)["bits"]).into();
    assert_eq!(bits, [&json!(16.0), &json!(8.5), &json!(4.5)]);
}

#[test]
fn codecs_are_compared_at_equal_exact_tokens() {
    let lab = Lab::new();
    let exact = |kv: &str, more: &[&str]| {
        let args = ["--tokens", "400", "--scored", "20", "--kv", kv];
        let (_, found) = lab.experiment("kld", &[&args[..], more].concat());
        (found["exact_tokens"].clone(), finding(&found, "q4_0")["kld"].as_f64().expect("a number"))
    };
    let (none, alone) = exact("q4_0", &[]);
    assert_eq!(none, json!({"newest": 0, "sink": 0}));
    // Beside a codec that can't do without exact tokens, the others have as many, and diverge less.
    let (page, beside) = exact("q4_0,kvarn4", &[]);
    assert_eq!(page, json!({"newest": 128, "sink": 0}));
    assert!(beside < alone, "{beside} {alone}");
    let (asked, more) = exact("q4_0,kvarn4", &["--cache-stage-tokens", "512"]);
    assert_eq!(asked, json!({"newest": 512, "sink": 0}));
    assert!(more < 1e-6, "all is exact: {more}");
}

#[test]
fn row_by_row_and_many_rows_at_once_give_the_same_divergence() {
    let lab = Lab::new();
    let found = |rows: &str, passages: &str| {
        let args = ["--tokens", "60", "--scored", "20", "--kv", "q4_0", "--rows", rows, "--passages", passages];
        let (_, found) = lab.experiment("kld", &args);
        let q4 = finding(&found, "q4_0").clone();
        (q4["kld"].as_f64().expect("a number"), q4["ppl"].as_f64().expect("a number"))
    };
    let (one, many) = (found("1", "2"), found("7", "2"));
    assert!((one.0 / many.0 - 1.0).abs() < 1e-3 && (one.1 / many.1 - 1.0).abs() < 1e-5, "{one:?} {many:?}");
}

#[test]
fn a_gate_that_is_failed_is_the_exit_status() {
    let lab = Lab::new();
    let svg = lab.path("lab.svg");
    let args = ["--tokens", "64", "--passages", "2", "--kv", "q4_0,q8_0", "--svg", &svg];
    let gates = ["--gate", "q8_0.kld<0.5*q4_0.kld", "--gate", "bits<=5"];
    let (status, found) = lab.experiment("ppl", &[&args[..], &gates[..]].concat());
    assert_eq!((status, &found["passed"]), (Some(3), &json!(false)));
    let verdicts: Vec<(&str, bool)> = found["gates"]
        .as_array()
        .expect("verdicts")
        .iter()
        .map(|v| (v["kv"].as_str().unwrap_or_default(), v["passed"] == true))
        .collect();
    assert_eq!(verdicts, [("", true), ("q4_0", true), ("q8_0", false)], "{found}");
    assert!(std::fs::read_to_string(svg).expect("the plot").contains(">q8_0</text>"));
}

#[test]
fn codecs_are_measured_on_what_the_model_writes() {
    let lab = Lab::new();
    let args = ["--tokens", "256", "--queries", "8", "--kv", "f16,q8_0,q4_0,f16:q4_0", "--gate", "attention_tv<=0.05"];
    let (status, found) = lab.experiment("codecs", &args);
    assert_eq!(status, Some(0), "{found}");
    let of = |kv: &str, metric: &str| finding(&found, kv)[metric].as_f64().expect("a number");
    for metric in ["mse_k", "logit_mse", "attention_tv", "mse_v", "output_mse"] {
        assert!(of("f16", metric) < of("q8_0", metric) && of("q8_0", metric) < of("q4_0", metric), "{metric}: {found}");
    }
    // A block of 32 normal values in q4_0 has a relative squared error of 0.0074, rotated or not.
    assert!((0.005..0.01).contains(&of("q4_0", "mse_v")), "{found}");
    assert_eq!(of("f16:q4_0", "attention_tv"), of("f16", "attention_tv"), "values don't change weights");
    assert_eq!(of("f16:q4_0", "mse_v"), of("q4_0", "mse_v"));
    let layers = found["layers"][0]["layers"].as_array().map(Vec::len);
    assert_eq!(layers, Some(2), "{found}");
    let (_, exact) = lab.experiment("codecs", &["--tokens", "256", "--kv", "q4_0", "--sink", "256"]);
    let q4 = finding(&exact, "q4_0");
    assert_eq!((&q4["mse_k"], &q4["mse_v"], &q4["output_mse"]), (&json!(0.0), &json!(0.0), &json!(0.0)), "{exact}");
}

#[test]
fn every_question_is_asked_of_every_pair() {
    let lab = Lab::new();
    let args = ["--lengths", "450", "--depths", "20,80", "--kv", "bf16,q4_0", "--gate", "surprise<=1.05*f16.surprise"];
    let (_, found) = lab.experiment("niah", &args);
    for asked in found["questions"].as_array().expect("questions") {
        let outcomes: Vec<(&str, u64)> = asked["outcomes"]
            .as_array()
            .expect("outcomes")
            .iter()
            .map(|o| (o["task"].as_str().unwrap_or_default(), o["depth"].as_u64().unwrap_or(999)))
            .collect();
        let expected = ["single", "keys", "hops"].map(|task| [(task, 20), (task, 80)]).concat();
        assert_eq!(outcomes, expected, "{asked}");
    }
    // A random model knows nothing, but is as surprised whatever stores its cache, up to rounding.
    let surprise = |kv: &str| finding(&found, kv)["surprise"].as_f64().expect("a number");
    assert!((surprise("bf16") / surprise("f16") - 1.0).abs() < 0.01, "{found}");
    assert_eq!(finding(&found, "f16")["recall"], 0.0, "{found}");
    assert_eq!((&finding(&found, "f16")["kld"], &found["gates"][0]["passed"]), (&json!(0.0), &json!(true)));
    assert!(finding(&found, "q4_0")["kld"].as_f64() > finding(&found, "bf16")["kld"].as_f64(), "{found}");
}

#[test]
fn a_sweep_takes_every_codec_that_is_loaded_and_marks_those_that_none_surpasses() {
    let lab = Lab::new();
    // Two pages before the scored tokens, which are exact in no codec.
    let args = ["--tokens", "300", "--scored", "20", "--sides", "--cache-stage-tokens", "0"];
    let (status, found) = lab.experiment("sweep", &args);
    assert_eq!((status, &found["passed"]), (Some(0), &json!(true)), "{found}");
    for kv in ["f16", "bf16", "q8_0", "q4_0", "q4_0:f16", "f16:q4_0"] {
        let front = finding(&found, kv)["front"].as_f64().expect("a number");
        assert!(front == 0.0 || front == 1.0, "{kv}: {found}");
    }
    // Nothing is nearer to the reference than itself, and what is as large is surpassed by it.
    assert_eq!((&finding(&found, "f16")["front"], &finding(&found, "bf16")["front"]), (&json!(1.0), &json!(0.0)));
    let bits: Vec<f64> =
        found["findings"].as_array().expect("findings").iter().filter_map(|f| f["bits"].as_f64()).collect();
    assert!(bits.len() >= 19 && bits.is_sorted_by(|a, b| a >= b), "{bits:?}");
}

#[test]
fn a_table_of_one_model_prepares_its_keys_and_is_refused_for_another() {
    let lab = Lab::new();
    let (text, table) = (lab.path("text"), lab.path("table.json"));
    let output = lab.run(&["lab", "calibrate"], &["--text", &text, "--tokens", "256", "--out", &table]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&table).expect("the table")).expect("JSON");
    assert_eq!((&written["groups"][0]["width"], &written["tokens"]), (&json!(64), &json!(256)));

    let args = ["--tokens", "256", "--queries", "16", "--kv", "q4_0+rotation=none", "--table", &table, "--with"];
    let error = |with: &str| {
        let (_, found) = lab.experiment("codecs", &[&args[..], &[with]].concat());
        finding(&found, "q4_0+rotation=none")["logit_mse"].as_f64().expect("a number")
    };
    let (_, plain) = lab.experiment("codecs", &args[..6]);
    let plain = finding(&plain, "q4_0+rotation=none")["logit_mse"].as_f64().expect("a number");
    let found = ["mean", "scale", "both"].map(error);
    assert!(found.iter().all(|e| *e != plain && *e > 0.0 && *e < 2.0 * plain), "{plain} {found:?}");
    // The text repeats, so that keys have large means: without them there is less to store.
    assert!(found[0] < plain, "{plain} {found:?}");

    opencoti_tests::model::write_with(&lab.site.path("tiny.gguf"), &["<more>"]).expect("another model");
    let args = [&["--text", &text], &args[..args.len() - 1]].concat();
    let sentence = refusal(&lab.run(&["lab", "codecs"], &args));
    assert!(sentence.contains("table for another model (`tiny`)"), "{sentence}");
    std::fs::write(&table, "{}").expect("written");
    assert!(refusal(&lab.run(&["lab", "codecs"], &args)).contains("is no table of `opencoti lab calibrate`"));
}

#[test]
fn logits_are_written_as_rows_of_floats() {
    let lab = Lab::new();
    let (ids, out) = (lab.path("ids.json"), lab.path("logits"));
    std::fs::write(&ids, "[1, 2, 3, 4, 5]").expect("the ids");
    let output = lab.run(&["lab", "logits"], &["--ids", &ids, "--out", &out, "--rows", "2", "--tokens", "4"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout);
    // 256 bytes, three special tokens, six merges.
    assert!(said.contains("4 rows of 265 logits"), "{said}");
    assert_eq!(std::fs::metadata(&out).expect("the file").len(), 4 * 265 * 4);
}

#[test]
fn what_cannot_be_measured_is_refused_in_a_sentence() {
    let lab = Lab::new();
    let (text, ids, none) = (lab.path("text"), lab.path("ids.json"), lab.path("none"));
    std::fs::write(&ids, "[1, 9999]").expect("the ids");
    let cases: [(&[&str], &[&str], &str); 8] = [
        (&["bench"], &["--kv", "q9"], "codec `q9` is offered by no plugin"),
        (&["bench"], &["--kv", "f16,f16"], "names `f16` twice"),
        (&["lab", "kld"], &["--text", &text], "nothing to compare `f16` with"),
        (&["lab", "kld"], &["--text", &none, "--kv", "q8_0"], "none can't be read"),
        (&["lab", "kld"], &["--text", &text, "--kv", "q8_0"], "but 1 passages of 4096 need 4096"),
        (&["lab", "kld"], &["--text", &text, "--kv", "q8_0", "--scored", "4096"], "expected 1 to 4095"),
        (&["lab", "ppl"], &["--text", &text, "--kv", "q8_0", "--gate", "x<1"], "`x` is not measured here"),
        (&["lab", "logits"], &["--ids", &ids, "--out", &none], "has token 9999, but the vocabulary has 265"),
    ];
    for (words, args, part) in cases {
        let sentence = refusal(&lab.run(words, args));
        assert!(sentence.contains(part), "{words:?} {args:?}: {sentence}");
    }
}
