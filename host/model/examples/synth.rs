//! Writes a made-up model: the exact shape of a real one with random weights.
//!
//!     synth PRESET --out FILE [--quant f16|q8_0|q4_0|q4_k_m] [--layers N] [--seed N] [--header]
//!
//! Defaults: q4_k_m, all layers, seed 1. With `--header`, weights are a hole that takes no room on disk. Without arguments,
//! lists the presets with their sizes.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use opencoti_model::synth::{PRESETS, Preset, Quant};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, mut rest)) = args.split_first() else { return list() };
    let preset = Preset::of(name)?;
    let (mut quant, mut layers, mut seed, mut out, mut header) = (Quant::Q4_K_M, None, 1, None, false);
    while let [flag, more @ ..] = rest {
        rest = more;
        if flag == "--header" {
            header = true;
            continue;
        }
        let [value, more @ ..] = rest else { bail!("`{flag}` needs a value") };
        rest = more;
        let number = || value.parse::<u64>().with_context(|| format!("`{flag} {value}`: expected a whole number"));
        match flag.as_str() {
            "--quant" => quant = value.parse()?,
            "--layers" => layers = Some(number()? as usize),
            "--seed" => seed = number()?,
            "--out" => out = Some(value),
            _ => bail!("`{flag}` is no option; known are --out, --quant, --layers, --seed and --header"),
        }
    }
    let path = std::path::Path::new(out.context("`--out FILE` is missing")?);
    let spec = preset.spec(quant, layers)?;
    let start = Instant::now();
    if header { spec.write_header(path) } else { spec.write(path, seed) }
        .with_context(|| format!("{} could not be written", path.display()))?;
    let (bytes, seconds) = (spec.file_bytes() as f64, start.elapsed().as_secs_f64());
    println!("{name}: {:.2} GB in {seconds:.1} s, {}", bytes / 1e9, path.display());
    Ok(())
}

fn list() -> Result<()> {
    println!("synth PRESET --out FILE [--quant f16|q8_0|q4_0|q4_k_m] [--layers N] [--seed N] [--header]\n");
    for preset in PRESETS {
        let spec = preset.spec(Quant::Q4_K_M, None)?;
        let parameters: usize = spec.tensors().iter().map(|t| t.elements()).sum();
        let (billions, gigabytes) = (parameters as f64 / 1e9, spec.file_bytes() as f64 / 1e9);
        println!("  {:<18} {billions:7.2} billion parameters, {gigabytes:6.2} GB in q4_k_m", preset.name);
    }
    Ok(())
}
