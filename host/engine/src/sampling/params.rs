//! What a request may ask of the sampler, with the defaults of the HTTP surface.

use super::SampleError;

/// One stage of the chain, by the name that requests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerKind {
    /// Repetition, frequency and presence penalties.
    Penalties,
    /// Sequence repetition penalty.
    Dry,
    /// Cut by standard deviations of the logits.
    TopNSigma,
    /// The k most probable.
    TopK,
    /// Locally typical.
    TypicalP,
    /// Nucleus.
    TopP,
    /// Relative to the most probable.
    MinP,
    /// Exclude top choices.
    Xtc,
    /// Temperature, fixed or dynamic.
    Temperature,
    /// Draw near a target probability; whatever its place, it makes the final draw.
    AdaptiveP,
}

/// Names, aliases and letters of the stages.
const NAMES: [(SamplerKind, &str, char, &[&str]); 10] = [
    (SamplerKind::Penalties, "penalties", 'e', &[]),
    (SamplerKind::Dry, "dry", 'd', &[]),
    (SamplerKind::TopNSigma, "top_n_sigma", 's', &["top-n-sigma"]),
    (SamplerKind::TopK, "top_k", 'k', &["top-k"]),
    (SamplerKind::TypicalP, "typ_p", 'y', &["typical_p", "typical-p", "typ-p", "typ", "typical"]),
    (SamplerKind::TopP, "top_p", 'p', &["top-p", "nucleus"]),
    (SamplerKind::MinP, "min_p", 'm', &["min-p"]),
    (SamplerKind::Xtc, "xtc", 'x', &[]),
    (SamplerKind::Temperature, "temperature", 't', &["temp"]),
    (SamplerKind::AdaptiveP, "adaptive_p", 'a', &["adaptive-p"]),
];

impl SamplerKind {
    /// The order used when a request names none.
    pub const DEFAULT_ORDER: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// The stage of a name or alias, `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, n, _, aliases)| *n == name || aliases.contains(&name)).map(|n| n.0)
    }

    /// The stage of a letter of the short form, as in `edskypmxt`.
    pub fn from_letter(letter: char) -> Option<Self> {
        NAMES.iter().find(|n| n.2 == letter).map(|n| n.0)
    }

    /// The name that is reported.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|n| n.0 == self).map_or("", |n| n.1)
    }
}

/// All sampling fields of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// ≤ 0 takes the most probable token.
    pub temperature: f32,
    /// Half width of the dynamic temperature; 0 turns it off.
    pub dynatemp_range: f32,
    /// Exponent of the normalised entropy in the dynamic temperature.
    pub dynatemp_exponent: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// ≤ 0 keeps all.
    pub top_n_sigma: f32,
    /// 1 keeps all.
    pub typical_p: f32,
    /// How often XTC acts; 0 turns it off.
    pub xtc_probability: f32,
    /// From which probability a token counts as a top choice.
    pub xtc_threshold: f32,
    /// Window of the penalties: 0 turns them off, −1 is the whole context.
    pub repeat_last_n: i32,
    /// Factor; 1 turns it off.
    pub repeat_penalty: f32,
    /// Per occurrence in the window.
    pub frequency_penalty: f32,
    /// Once for every token in the window.
    pub presence_penalty: f32,
    /// 0 turns DRY off.
    pub dry_multiplier: f32,
    /// Below 1 the default is used.
    pub dry_base: f32,
    /// Repeats up to this length are free.
    pub dry_allowed_length: u32,
    /// Window of DRY: 0 turns it off, −1 is the whole context.
    pub dry_penalty_last_n: i32,
    /// Texts across which repeats are not counted.
    pub dry_sequence_breakers: Vec<String>,
    /// 0 off, 1 or 2 replace all truncation by Mirostat.
    pub mirostat: u8,
    /// Mirostat's target surprise in bits.
    pub mirostat_tau: f32,
    /// Mirostat's learning rate.
    pub mirostat_eta: f32,
    /// Adaptive-p's target probability; negative turns it off.
    pub adaptive_target: f32,
    /// Adaptive-p's decay, 0 … 0.99.
    pub adaptive_decay: f32,
    /// The truncating samplers keep at least so many.
    pub min_keep: usize,
    /// Negative draws a random seed.
    pub seed: i64,
    /// The chain, in order.
    pub samplers: Vec<SamplerKind>,
    /// Added to the logits; −∞ bans a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Bans every token that ends an answer.
    pub ignore_eos: bool,
    /// How many alternatives are reported with each token; 0 reports no probabilities.
    pub n_probs: usize,
    /// Reports probabilities after the chain in place of those of the raw logits.
    pub post_sampling_probs: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            top_n_sigma: -1.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_last_n: 64,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: -1,
            dry_sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            min_keep: 0,
            seed: -1,
            samplers: SamplerKind::DEFAULT_ORDER.to_vec(),
            logit_bias: Vec::new(),
            ignore_eos: false,
            n_probs: 0,
            post_sampling_probs: false,
        }
    }
}

impl SamplingParams {
    /// Brings every field into its range: soft bounds are clamped, hard ones are errors that name the field.
    pub fn checked(mut self, n_vocab: usize) -> Result<Self, SampleError> {
        self.all_finite()?;
        let hard = |field, found: f64, expected| SampleError::OutOfRange { field, found, expected };
        if self.repeat_last_n < -1 {
            return Err(hard("repeat_last_n", self.repeat_last_n.into(), "-1 or more"));
        }
        if self.dry_penalty_last_n < -1 {
            return Err(hard("dry_penalty_last_n", self.dry_penalty_last_n.into(), "-1 or more"));
        }
        if self.dry_sequence_breakers.is_empty() {
            return Err(hard("dry_sequence_breakers", 0.0, "at least one text"));
        }
        if !(0.0..=0.99).contains(&self.adaptive_decay) {
            return Err(hard("adaptive_decay", self.adaptive_decay.into(), "0 to 0.99"));
        }
        if let Some(&(id, _)) = self.logit_bias.iter().find(|(id, _)| *id as usize >= n_vocab) {
            return Err(SampleError::UnknownToken { field: "logit_bias", id, n_vocab });
        }
        self.temperature = self.temperature.max(0.0);
        self.top_p = self.top_p.clamp(0.0, 1.0);
        self.min_p = self.min_p.clamp(0.0, 1.0);
        self.xtc_probability = self.xtc_probability.clamp(0.0, 1.0);
        self.xtc_threshold = self.xtc_threshold.clamp(0.0, 1.0);
        self.mirostat = self.mirostat.min(2);
        if self.dry_base < 1.0 {
            self.dry_base = Self::default().dry_base;
        }
        Ok(self)
    }

    fn all_finite(&self) -> Result<(), SampleError> {
        let fields = [
            ("temperature", self.temperature),
            ("dynatemp_range", self.dynatemp_range),
            ("dynatemp_exponent", self.dynatemp_exponent),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("top_n_sigma", self.top_n_sigma),
            ("typical_p", self.typical_p),
            ("xtc_probability", self.xtc_probability),
            ("xtc_threshold", self.xtc_threshold),
            ("repeat_penalty", self.repeat_penalty),
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
            ("dry_multiplier", self.dry_multiplier),
            ("dry_base", self.dry_base),
            ("mirostat_tau", self.mirostat_tau),
            ("mirostat_eta", self.mirostat_eta),
            ("adaptive_target", self.adaptive_target),
            ("adaptive_decay", self.adaptive_decay),
        ];
        match fields.into_iter().find(|(_, value)| !value.is_finite()) {
            Some((field, value)) => {
                Err(SampleError::OutOfRange { field, found: value.into(), expected: "a finite number" })
            }
            None if self.logit_bias.iter().any(|(_, bias)| bias.is_nan()) => {
                Err(SampleError::OutOfRange { field: "logit_bias", found: f64::NAN, expected: "a number" })
            }
            None => Ok(()),
        }
    }
}
