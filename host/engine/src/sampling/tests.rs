//! The chain as a whole: draws, seeds, biases, reported probabilities, and that nothing makes it panic.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn vocab(n: usize) -> Arc<Vocab> {
    Arc::new(Vocab::new((0..n).map(|i| (format!("t{i}").into_bytes(), false)).collect(), &[0]))
}

fn sampler(params: SamplingParams, n: usize) -> Sampler {
    Sampler::new(params, vocab(n)).expect("valid parameters")
}

/// Every truncation off: what is left is the plain distribution.
fn plain() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_last_n: 0,
        seed: 7,
        ..SamplingParams::default()
    }
}

fn frequencies(mut sampler: Sampler, logits: &[f32], draws: usize) -> Vec<f64> {
    let mut counts = vec![0u32; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(&mut logits.to_vec(), None).unwrap().token as usize] += 1;
    }
    counts.iter().map(|&c| f64::from(c) / draws as f64).collect()
}

#[test]
fn without_truncation_the_draws_follow_the_softmax() {
    let p = [0.1f32, 0.2, 0.3, 0.4];
    let logits = p.map(f32::ln);
    for (f, p) in frequencies(sampler(plain(), 4), &logits, 20_000).iter().zip(p) {
        assert!((f - f64::from(p)).abs() < 0.015, "{f} for {p}");
    }
}

#[test]
fn a_token_that_the_model_suppresses_is_never_drawn_not_even_by_a_bias() {
    let vocab = Vocab::new((0..4).map(|i| (vec![i], false)).collect(), &[0]).with_suppressed(&[2, 99]);
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, logit_bias: vec![(2, 50.0)], ..plain() };
        let sampler = Sampler::new(params, Arc::new(vocab.clone())).unwrap();
        let drawn = frequencies(sampler, &[0.0, 0.5, 9.0, 0.0], 300);
        assert_eq!(drawn[2], 0.0, "{drawn:?}");
    }
}

#[test]
fn the_same_seed_draws_the_same_tokens_and_another_seed_others() {
    let draws = |seed| {
        let mut s = sampler(SamplingParams { seed, ..plain() }, 50);
        (0..40).map(|_| s.sample(&mut [0.0; 50], None).unwrap().token).collect::<Vec<_>>()
    };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
}

#[test]
fn a_random_seed_is_reported_and_reproduces() {
    let mut random = sampler(SamplingParams { seed: -1, ..plain() }, 50);
    let mut again = sampler(SamplingParams { seed: random.seed().into(), ..plain() }, 50);
    for _ in 0..20 {
        assert_eq!(random.sample(&mut [0.0; 50], None), again.sample(&mut [0.0; 50], None));
    }
}

#[test]
fn temperature_zero_takes_the_best_after_the_penalties() {
    let mut s = sampler(SamplingParams { temperature: 0.0, presence_penalty: 2.0, ..SamplingParams::default() }, 3);
    assert_eq!(s.sample(&mut [1.0, 3.0, 2.0], None).unwrap().token, 1);
    s.accept(1);
    assert_eq!(s.sample(&mut [1.0, 3.0, 2.0], None).unwrap().token, 2);
}

#[test]
fn biases_ban_and_force() {
    let mut params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    params.logit_bias = vec![(1, f32::NEG_INFINITY), (0, 100.0)];
    assert_eq!(sampler(params, 3).sample(&mut [1.0, 3.0, 2.0], None).unwrap().token, 0);
}

#[test]
fn ignore_eos_bans_every_end_token() {
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    assert_eq!(sampler(params, 3).sample(&mut [9.0, 3.0, 2.0], None).unwrap().token, 1);
}

#[test]
fn a_bias_for_a_token_outside_the_vocabulary_is_refused_by_name() {
    let params = SamplingParams { logit_bias: vec![(3, 1.0)], ..SamplingParams::default() };
    let error = Sampler::new(params, vocab(3)).unwrap_err();
    assert_eq!(error.to_string(), "logit_bias names token 3, but the vocabulary has 3 tokens");
}

#[test]
fn the_mask_rules_out_even_the_best() {
    let mut mask = SimpleVob::alloc(3);
    mask.allow_token(2);
    let mut s = sampler(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 3);
    assert_eq!(s.sample(&mut [9.0, 3.0, 2.0], Some(&mask)).unwrap().token, 2);
    mask.disallow_token(2);
    assert_eq!(s.sample(&mut [9.0, 3.0, 2.0], Some(&mask)), Err(SampleError::NoCandidate));
}

#[test]
fn nan_is_an_error_that_names_the_token() {
    let error = sampler(plain(), 3).sample(&mut [0.0, f32::NAN, 0.0], None).unwrap_err();
    assert!(error.to_string().contains("token 1"), "{error}");
}

/// Probabilities ¼, ¾; the bias does not show in the raw log-probabilities.
#[test]
fn logprobs_are_of_the_raw_logits() {
    let params = SamplingParams { n_probs: 2, logit_bias: vec![(1, f32::NEG_INFINITY)], ..plain() };
    let drawn = sampler(params, 2).sample(&mut [0.25f32.ln(), 0.75f32.ln()], None).unwrap();
    assert_eq!(drawn.token, 0);
    assert!((drawn.logprob.unwrap() - 0.25f32.ln()).abs() < 1e-6);
    assert_eq!(drawn.top_logprobs.iter().map(|t| t.id).collect::<Vec<_>>(), [1, 0]);
    assert!((drawn.top_logprobs[0].logprob - 0.75f32.ln()).abs() < 1e-6);
}

/// Top-k 2 of ½, ¼, ¼ leaves ⅔ and ⅓.
#[test]
fn post_sampling_probs_are_what_the_chain_left() {
    let params = SamplingParams { n_probs: 5, post_sampling_probs: true, top_k: 2, ..plain() };
    let drawn = sampler(params, 3).sample(&mut [0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()], None).unwrap();
    let p: Vec<f32> = drawn.top_logprobs.iter().map(|t| t.logprob.exp()).collect();
    assert_eq!(p.len(), 2);
    assert!((p[0] - 2.0 / 3.0).abs() < 1e-6 && (p[1] - 1.0 / 3.0).abs() < 1e-6);
}

#[test]
fn no_probabilities_are_reported_unless_asked_for() {
    let drawn = sampler(plain(), 3).sample(&mut [0.0; 3], None).unwrap();
    assert_eq!((drawn.logprob, drawn.top_logprobs.len()), (None, 0));
}

#[test]
fn forks_share_the_history_and_draw_differently() {
    let mut parent = sampler(plain(), 50);
    parent.accept(3);
    let (mut a, mut b) = (parent.fork(0), parent.fork(1));
    let draws = |s: &mut Sampler| (0..20).map(|_| s.sample(&mut [0.0; 50], None).unwrap().token).collect::<Vec<_>>();
    assert_eq!(draws(&mut parent), draws(&mut a));
    assert_ne!(draws(&mut a), draws(&mut b));
}

#[test]
fn sampler_names_and_letters_agree() {
    let letters: Vec<_> = "edskypmxt".chars().filter_map(SamplerKind::from_letter).collect();
    assert_eq!(letters, SamplerKind::DEFAULT_ORDER);
    for kind in SamplerKind::DEFAULT_ORDER {
        assert_eq!(SamplerKind::from_name(kind.name()), Some(kind));
    }
    assert_eq!(SamplerKind::from_name("temprature"), None);
}

fn any_kind() -> impl Strategy<Value = SamplerKind> {
    proptest::sample::select(&SamplerKind::DEFAULT_ORDER[..])
}

/// Ordinary values and the ends of each range.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![-2.0f32..3.0, Just(0.0), Just(1.0), Just(-1.0), Just(f32::MAX), Just(f32::MIN), Just(1e-30),]
}

prop_compose! {
    fn any_params()(
        numbers in proptest::collection::vec(number(), 17),
        samplers in proptest::collection::vec(any_kind(), 0..12),
        top_k in prop_oneof![0u32..6, Just(u32::MAX)],
        windows in (-1i32..6, -1i32..6, 0u32..4),
        mirostat in 0u8..3,
        min_keep in prop_oneof![0usize..6, Just(usize::MAX)],
        decay in 0.0f32..0.99,
        probs in (0usize..20, any::<bool>(), any::<bool>()),
    ) -> SamplingParams {
        SamplingParams {
            temperature: numbers[0],
            dynatemp_range: numbers[1],
            dynatemp_exponent: numbers[2],
            top_p: numbers[3],
            min_p: numbers[4],
            top_n_sigma: numbers[5],
            typical_p: numbers[6],
            xtc_probability: numbers[7],
            xtc_threshold: numbers[8],
            repeat_penalty: numbers[9],
            frequency_penalty: numbers[10],
            presence_penalty: numbers[11],
            dry_multiplier: numbers[12],
            dry_base: numbers[13],
            mirostat_tau: numbers[14],
            mirostat_eta: numbers[15],
            adaptive_target: numbers[16],
            adaptive_decay: decay,
            top_k,
            repeat_last_n: windows.0,
            dry_penalty_last_n: windows.1,
            dry_allowed_length: windows.2,
            dry_sequence_breakers: vec!["t1".to_owned()],
            mirostat,
            min_keep,
            seed: 1,
            samplers,
            logit_bias: vec![(2, numbers[0]), (3, f32::INFINITY)],
            ignore_eos: probs.1,
            n_probs: probs.0,
            post_sampling_probs: probs.2,
        }
    }
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![-10.0f32..10.0, Just(f32::NEG_INFINITY), Just(0.0), Just(-1e30), Just(3e38)]
}

proptest! {
    /// Whatever the parameters, a draw neither panics nor yields a token that was ruled out.
    #[test]
    fn no_parameters_make_it_panic_or_draw_a_ruled_out_token(
        params in any_params(),
        logits in proptest::collection::vec(logit(), 8),
        history in proptest::collection::vec(0u32..8, 0..20),
    ) {
        let mut s = sampler(params, 8);
        history.iter().for_each(|&t| s.accept(t));
        for _ in 0..3 {
            let mut biased = logits.clone();
            match s.sample(&mut biased, None) {
                Ok(drawn) => {
                    prop_assert!(logits[drawn.token as usize] > f32::NEG_INFINITY);
                    prop_assert!(biased[drawn.token as usize] > f32::NEG_INFINITY);
                    prop_assert!(drawn.logprob.is_none_or(|l| l.is_finite() && l <= 1e-3));
                    s.accept(drawn.token);
                }
                Err(error) => {
                    prop_assert_eq!(error, SampleError::NoCandidate);
                    prop_assert!(biased.iter().all(|l| *l == f32::NEG_INFINITY));
                }
            }
        }
    }
}
