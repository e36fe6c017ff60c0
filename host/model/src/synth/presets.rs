//! Shapes of real models.

use super::families::{Attention, DeltaNet, Experts, Family, Gemma4, Shape};
use super::{Quant, Spec, SynthError};

/// A model by its name on the command line.
#[derive(Debug)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    pub(super) shape: Shape,
}

impl Preset {
    /// The preset of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn of(name: &str) -> Result<&'static Preset, SynthError> {
        let known = || PRESETS.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
        let found = PRESETS.iter().find(|p| p.name == name);
        found.ok_or_else(|| SynthError::Preset { found: name.to_owned(), known: known() })
    }

    /// Its keys and tensors, of all its layers or of the first ones.
    ///
    /// # Errors
    /// There are not as many layers.
    pub fn spec(&self, quant: Quant, layers: Option<usize>) -> Result<Spec, SynthError> {
        let (most, found) = (self.shape.layers, layers.unwrap_or(self.shape.layers));
        match (1..=most).contains(&found) {
            true => Ok(self.shape.cut(found).spec(self.name, quant)),
            false => Err(SynthError::Layers { name: self.name, found, most }),
        }
    }
}

const LLAMA: Shape = Shape {
    family: Family::Llama,
    arch: "llama",
    layers: 0,
    width: 0,
    attention: Attention { heads: 0, kv_heads: 0, head: 64, base: 1e4, rotated: 64 },
    ff: 0,
    vocabulary: 49_152,
    context: 8_192,
    tied: true,
    eps: 1e-5,
    experts: None,
};
const LLAMA3: Shape = Shape {
    attention: Attention { heads: 0, kv_heads: 8, head: 128, base: 5e5, rotated: 128 },
    vocabulary: 128_256,
    context: 131_072,
    tied: false,
    ..LLAMA
};
const QWEN2: Shape =
    Shape { family: Family::Qwen2, arch: "qwen2", vocabulary: 152_064, context: 131_072, eps: 1e-6, ..LLAMA3 };
const QWEN3: Shape = Shape { family: Family::Qwen3, arch: "qwen3", vocabulary: 151_936, context: 40_960, ..QWEN2 };
const QWEN3_MOE: Shape = Shape { arch: "qwen3moe", ..QWEN3 };
const GEMMA: Shape = Shape { vocabulary: 262_144, context: 131_072, tied: true, eps: 1e-6, ..LLAMA };
const QWEN35: Shape = Shape { arch: "qwen35", vocabulary: 248_320, context: 262_144, tied: false, ..QWEN3 };

const fn heads(heads: usize, kv_heads: usize, head: usize, base: f32) -> Attention {
    Attention { heads, kv_heads, head, base, rotated: head }
}

const fn gated(heads: usize, kv_heads: usize) -> Attention {
    Attention { heads, kv_heads, head: 256, base: 1e7, rotated: 64 }
}

const fn gemma3(window: usize) -> Family {
    Family::Gemma3 { window }
}

const fn delta_net(v_heads: usize) -> Family {
    Family::Hybrid(DeltaNet { k_heads: 16, v_heads, head: 128, taps: 4, period: 4 })
}

const fn experts(count: usize, used: usize, width: usize, shared: usize) -> Option<Experts> {
    Some(Experts { count, used, width, shared })
}

const fn preset(
    name: &'static str,
    layers: usize,
    width: usize,
    attention: Attention,
    ff: usize,
    shape: Shape,
) -> Preset {
    Preset { name, shape: Shape { layers, width, attention, ff, ..shape } }
}

/// All presets.
pub static PRESETS: &[Preset] = &[
    preset("smollm2-135m", 30, 576, heads(9, 3, 64, 1e5), 1536, LLAMA),
    preset("smollm2-360m", 32, 960, heads(15, 5, 64, 1e5), 2560, LLAMA),
    preset("smollm2-1.7b", 24, 2048, heads(32, 32, 64, 1.3e5), 8192, LLAMA),
    preset("llama3-8b", 32, 4096, heads(32, 8, 128, 5e5), 14_336, LLAMA3),
    preset("llama3-70b", 80, 8192, heads(64, 8, 128, 5e5), 28_672, LLAMA3),
    preset(
        "qwen2-0.5b",
        24,
        896,
        heads(14, 2, 64, 1e6),
        4864,
        Shape { vocabulary: 151_936, context: 32_768, tied: true, ..QWEN2 },
    ),
    preset("qwen2-7b", 28, 3584, heads(28, 4, 128, 1e6), 18_944, QWEN2),
    preset("qwen2-14b", 48, 5120, heads(40, 8, 128, 1e6), 13_824, QWEN2),
    preset("qwen3-0.6b", 28, 1024, heads(16, 8, 128, 1e6), 3072, Shape { tied: true, ..QWEN3 }),
    preset("qwen3-8b", 36, 4096, heads(32, 8, 128, 1e6), 12_288, QWEN3),
    preset("qwen3-14b", 40, 5120, heads(40, 8, 128, 1e6), 17_408, QWEN3),
    preset("qwen3-32b", 64, 5120, heads(64, 8, 128, 1e6), 25_600, QWEN3),
    preset(
        "qwen3-30b-a3b",
        48,
        2048,
        heads(32, 4, 128, 1e6),
        6144,
        Shape { experts: experts(128, 8, 768, 0), ..QWEN3_MOE },
    ),
    // The shape of 30B-A3B, smaller in every direction: an eighth of the experts' weights is active.
    preset(
        "moe-1gb",
        16,
        1024,
        heads(16, 4, 128, 1e6),
        3072,
        Shape { vocabulary: 32_768, experts: experts(64, 8, 512, 0), ..QWEN3_MOE },
    ),
    preset(
        "gemma3-270m",
        18,
        640,
        heads(4, 1, 256, 1e6),
        2048,
        Shape { family: gemma3(512), arch: "gemma3", context: 32_768, ..GEMMA },
    ),
    preset(
        "gemma3-1b",
        26,
        1152,
        heads(4, 1, 256, 1e6),
        6912,
        Shape { family: gemma3(512), arch: "gemma3", context: 32_768, ..GEMMA },
    ),
    preset(
        "gemma3-4b",
        34,
        2560,
        heads(8, 4, 256, 1e6),
        10_240,
        Shape { family: gemma3(1024), arch: "gemma3", ..GEMMA },
    ),
    preset(
        "gemma3-12b",
        48,
        3840,
        heads(16, 8, 256, 1e6),
        15_360,
        Shape { family: gemma3(1024), arch: "gemma3", ..GEMMA },
    ),
    preset(
        "gemma3-27b",
        62,
        5376,
        heads(32, 16, 128, 1e6),
        21_504,
        Shape { family: gemma3(1024), arch: "gemma3", ..GEMMA },
    ),
    gemma4(
        "gemma4-e2b",
        35,
        1536,
        8,
        [1, 1],
        6144,
        Gemma4 { window: 512, period: 5, shared: 20, wide: true, per_layer: 256, own_values: true },
    ),
    gemma4(
        "gemma4-e4b",
        42,
        2560,
        8,
        [2, 2],
        10_240,
        Gemma4 { window: 512, shared: 18, per_layer: 256, own_values: true, ..GEMMA4 },
    ),
    gemma4("gemma4-12b", 48, 3840, 16, [8, 1], 15_360, GEMMA4),
    Preset {
        name: "gemma4-26b-a4b",
        shape: Shape { experts: experts(128, 8, 704, 0), ..gemma4("", 30, 2816, 16, [8, 2], 2112, GEMMA4).shape },
    },
    gemma4("gemma4-31b", 60, 5376, 32, [16, 4], 21_504, GEMMA4),
    preset("qwen35-0.8b", 24, 1024, gated(8, 2), 3584, Shape { family: delta_net(16), tied: true, ..QWEN35 }),
    preset("qwen35-9b", 32, 4096, gated(16, 4), 12_288, Shape { family: delta_net(32), ..QWEN35 }),
    preset("qwen35-27b", 64, 5120, gated(24, 4), 17_408, Shape { family: delta_net(48), ..QWEN35 }),
    preset(
        "qwen35-35b-a3b",
        40,
        2048,
        gated(16, 2),
        0,
        Shape { family: delta_net(32), arch: "qwen35moe", experts: experts(256, 8, 512, 512), ..QWEN35 },
    ),
    preset(
        "qwen3next-80b-a3b",
        48,
        2048,
        gated(16, 2),
        0,
        Shape {
            family: delta_net(32),
            arch: "qwen3next",
            vocabulary: 151_936,
            experts: experts(512, 10, 512, 512),
            ..QWEN35
        },
    ),
];

const GEMMA4: Gemma4 = Gemma4 { window: 1024, period: 6, shared: 0, wide: false, per_layer: 0, own_values: false };

/// `kv` are the KV heads of window layers and of full ones.
const fn gemma4(
    name: &'static str,
    layers: usize,
    width: usize,
    n_heads: usize,
    kv: [usize; 2],
    ff: usize,
    parts: Gemma4,
) -> Preset {
    let shape = Shape { family: Family::Gemma4(parts, kv[1]), arch: "gemma4", context: 262_144, ..GEMMA };
    preset(name, layers, width, heads(n_heads, kv[0], 256, 1e6), ff, shape)
}
