//! The tests: what is run at which depth, and how much of a cache it takes.

use opencoti_plugin_api::PAGE_TOKENS;

use super::Options;

/// Kinds of tests, as they are named on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A prompt.
    Prefill,
    /// Single tokens of one sequence.
    Decode,
    /// A prompt that comes in while a sequence decodes.
    Mixed,
    /// Single tokens of many sequences.
    Batch,
    /// The same behind a prefix that all share.
    Shared,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [Kind::Prefill, Kind::Decode, Kind::Mixed, Kind::Batch, Kind::Shared];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Prefill => "prefill",
            Kind::Decode => "decode",
            Kind::Mixed => "mixed",
            Kind::Batch => "batch",
            Kind::Shared => "shared",
        }
    }

    /// The kind of that name.
    pub fn of(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// One test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Test {
    /// Its kind.
    pub kind: Kind,
    /// Tokens of the prompt, or that each sequence decodes.
    pub tokens: usize,
    /// Tokens of a sequence before those that are measured.
    pub depth: usize,
    /// Sequences that run at once, without the prompt of a mixed test.
    pub sequences: usize,
}

impl Test {
    /// Length that a sequence reaches.
    pub fn context(&self) -> usize {
        self.depth + self.tokens
    }

    /// Sequences whose first `depth` tokens must be there: all fork from one, or each has its own.
    pub fn donors(&self) -> usize {
        match self.kind {
            _ if self.depth == 0 => 0,
            Kind::Batch => self.sequences,
            _ => 1,
        }
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Test { kind, tokens, depth, sequences } = *self;
        match kind {
            Kind::Prefill => write!(f, "prefill {tokens} @ {depth}"),
            Kind::Decode => write!(f, "decode @ {depth}"),
            Kind::Mixed => write!(f, "decode @ {depth} + prefill {tokens}"),
            Kind::Batch => write!(f, "decode {sequences} x @ {depth}"),
            Kind::Shared => write!(f, "decode {sequences} x @ {depth} shared"),
        }
    }
}

/// The tests that are asked for, those together that share caches: of one sequence, of many, of many with a prefix. Depths
/// ascend, so that sequences can grow from one to the next.
pub fn stages(options: &Options) -> [Vec<Test>; 3] {
    let wanted = |kind: Kind| options.kinds.contains(&kind);
    let ascending = |list: &[usize]| {
        let mut list = list.to_vec();
        list.sort_unstable();
        list.dedup();
        list
    };
    let mut single = Vec::new();
    for depth in ascending(&options.depths) {
        for kind in [Kind::Prefill, Kind::Decode, Kind::Mixed].into_iter().filter(|&kind| wanted(kind)) {
            let tokens = if kind == Kind::Decode { options.generate } else { options.prompt };
            single.push(Test { kind, tokens, depth, sequences: 1 });
        }
    }
    let many = |kind: Kind, depth: usize| -> Vec<Test> {
        let batches = ascending(&options.batches).into_iter().filter(|_| wanted(kind));
        batches.map(|sequences| Test { kind, tokens: options.generate, depth, sequences }).collect()
    };
    [single, many(Kind::Batch, options.batch_depth), many(Kind::Shared, options.prefix)]
}

/// Tokens and sequences for which a cache must have room to run any of the tests.
pub fn needs(tests: &[Test]) -> (usize, usize) {
    // A page more for each sequence, which ends in the middle of one.
    let pages = |tokens: usize| tokens.div_ceil(PAGE_TOKENS) + 1;
    let donors = tests.iter().map(Test::donors).max().unwrap_or(0);
    let depth = tests.iter().map(|t| t.depth).max().unwrap_or(0);
    // A mixed test has a sequence more: the prompt.
    let sequences = tests.iter().map(|t| t.sequences).max().unwrap_or(0) + 1;
    let tokens = tests.iter().map(|t| t.tokens).max().unwrap_or(0);
    let all_pages = donors * pages(depth) + sequences * pages(tokens);
    (all_pages * PAGE_TOKENS, donors + sequences)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(kinds: &[Kind]) -> Options {
        Options {
            kinds: kinds.to_vec(),
            kv: Vec::new(),
            prompt: 100,
            generate: 10,
            depths: vec![200, 0, 200],
            batches: vec![4, 2],
            batch_depth: 50,
            prefix: 300,
            repeat: 1,
            floor: false,
            as_json: false,
            json: None,
            svg: None,
            interactive: false,
        }
    }

    #[test]
    fn depths_and_batches_ascend_and_none_is_run_twice() {
        let [single, own, shared] = stages(&options(&Kind::ALL));
        let names: Vec<String> = single.iter().chain(&own).chain(&shared).map(ToString::to_string).collect();
        let expected = [
            "prefill 100 @ 0",
            "decode @ 0",
            "decode @ 0 + prefill 100",
            "prefill 100 @ 200",
            "decode @ 200",
            "decode @ 200 + prefill 100",
            "decode 2 x @ 50",
            "decode 4 x @ 50",
            "decode 2 x @ 300 shared",
            "decode 4 x @ 300 shared",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_cache_has_room_for_donors_and_those_who_fork_from_them() {
        let [_, own, shared] = stages(&options(&[Kind::Batch, Kind::Shared]));
        // Four donors of a page and a rest each, and five sequences of the same.
        assert_eq!(needs(&own), ((4 * 2 + 5 * 2) * PAGE_TOKENS, 9));
        assert_eq!(needs(&shared), ((4 + 5 * 2) * PAGE_TOKENS, 6));
    }
}
