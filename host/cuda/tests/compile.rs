//! Every kernel compiles for every architecture, without a card, and what it uses is on record.
//!
//! The compiler (NVRTC, which assembles too) is enough; `cargo xtask test` fetches it. Where there is none the test says so and
//! passes; `OPENCOTI_TEST_NVRTC=required` makes it fail instead. `UPDATE_EXPECT=1` writes the record anew. All codecs
//! are compiled for one architecture, two of them for each; `OPENCOTI_TEST_KERNELS=all` compiles everything.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use opencoti_cuda::compile::{ARCHITECTURES, CodecSource, Program, Usage, compile, has_compiler, key};
use opencoti_cuda::weights::Format;
use opencoti_plugin_api::host::{Codec, CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

const CODECS: [&str; 7] = ["f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_0"];
const HEAD_DIMS: [usize; 5] = [64, 96, 128, 256, 512];
/// The architecture for which every codec is compiled each time.
const WHOLE: [u32; 1] = [90];

fn codec(name: &str, rotated: bool, side: Side, head_dim: usize) -> Codec {
    let plugin = Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink)).unwrap();
    let rotation = if rotated { "hadamard" } else { "none" };
    let options = format!(r#"{{"rotation":"{rotation}"}}"#);
    CodecPlugin::new(plugin).unwrap().open(name, &options, side, head_dim).unwrap()
}

/// Keys of each codec with values of another; every second one rotated.
fn attention(codecs: &[usize]) -> Vec<Program> {
    let pairs = codecs.iter().flat_map(|&i| HEAD_DIMS.map(|d| (i, d)));
    let program = |(i, d): (usize, usize)| {
        let k = CodecSource::of(&codec(CODECS[i], i % 2 == 1, Side::K, d)).unwrap();
        let v = CodecSource::of(&codec(CODECS[(i + 3) % 7], i % 2 == 0, Side::V, d)).unwrap();
        Program::attention(&k, d, &v, d)
    };
    pairs.map(program).collect()
}

fn programs(arch: u32) -> Vec<Program> {
    let all = WHOLE.contains(&arch) || std::env::var("OPENCOTI_TEST_KERNELS").is_ok_and(|v| v == "all");
    let mut programs = vec![Program::rows(), Program::merge()];
    programs.extend(Format::names().map(Program::products));
    programs.extend(attention(if all { &[0, 1, 2, 3, 4, 5, 6] } else { &[0, 3] }));
    programs
}

/// What a program's kernels use, from an earlier run or by compiling it.
fn usage(program: &Program, arch: u32) -> Vec<Usage> {
    let folder = std::env::var_os("OPENCOTI_TEST_KERNEL_USAGE")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let file = folder.join(key(program, arch));
    if let Ok(text) = std::fs::read_to_string(&file) {
        let parse = |line: &str| {
            let parts: Vec<&str> = line.split(' ').collect();
            let number = |i: usize| parts[i].parse().unwrap();
            Usage { kernel: parts[0].to_owned(), registers: number(1), spilled: number(2), shared: number(3) }
        };
        return text.lines().map(parse).collect();
    }
    let usage = compile(program, arch).unwrap_or_else(|e| panic!("sm_{arch}: {e}")).usage;
    let lines: Vec<String> =
        usage.iter().map(|u| format!("{} {} {} {}", u.kernel, u.registers, u.spilled, u.shared)).collect();
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, lines.join("\n")).unwrap();
    usage
}

#[test]
fn every_kernel_compiles_for_every_architecture_and_uses_no_more_than_is_on_record() {
    if !has_compiler() {
        let required = std::env::var("OPENCOTI_TEST_NVRTC").is_ok_and(|v| v == "required");
        assert!(!required, "libnvrtc was not found; `cargo xtask test` fetches it");
        eprintln!("not run: libnvrtc was not found");
        return;
    }
    let work: Vec<(u32, Program)> =
        ARCHITECTURES.into_iter().flat_map(|arch| programs(arch).into_iter().map(move |p| (arch, p))).collect();
    let queue = Mutex::new(work.iter());
    let found: Mutex<BTreeMap<(u32, String), Usage>> = Mutex::default();
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap().next();
                    let Some((arch, program)) = next else { return };
                    for u in usage(program, *arch) {
                        let mut found = found.lock().unwrap();
                        let most = found.entry((*arch, u.kernel.clone())).or_default();
                        most.registers = most.registers.max(u.registers);
                        most.spilled = most.spilled.max(u.spilled);
                        most.shared = most.shared.max(u.shared);
                    }
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    let mut record = String::from(
        "architecture kernel registers spilled-bytes static-shared-bytes, the most of all formats and codecs\n",
    );
    for ((arch, kernel), u) in &found {
        record += &format!("sm_{arch} {kernel} {} {} {}\n", u.registers, u.spilled, u.shared);
        // Products are what decoding waits for.
        if ["few8", "few16", "many32", "many128"].contains(&kernel.as_str()) {
            assert_eq!(u.spilled, 0, "sm_{arch} {kernel} spills registers");
        }
    }
    if std::env::var("OPENCOTI_TEST_KERNELS").is_err() {
        expect_test::expect_file!["../kernels/usage.txt"].assert_eq(&record);
    }
}
