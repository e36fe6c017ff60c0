//! Codecs that fail: the step ends with a sentence, no worker waits for ever, and the plugin is in quarantine.

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::simd::Isa;

use crate::cases::Case;
use crate::run;

#[test]
fn a_codec_that_panics_ends_the_step_with_a_sentence() {
    for (codec, sentence) in [
        ("panics-in-append", "codec `panics-in-append` of plugin `plain` could not store K: the plugin panicked"),
        ("panics-in-decode", "codec `panics-in-decode` of plugin `plain` could not read K: the plugin panicked"),
    ] {
        for workers in [1, 3] {
            let case = Case::faulty(codec);
            let mut attention = Attention::new(&case.graph);
            let error = run(&case, &mut attention, Isa::detect(), workers).unwrap_err();
            assert!(error.starts_with(sentence) || error.contains("quarantine"), "{error}");
            let health = case.step.stores[0].layers[0].k.codec.plugin().health();
            assert!(health.is_quarantined());
            // The next step is refused as well, without a call to the plugin.
            let error = run(&case, &mut attention, Isa::detect(), workers).unwrap_err();
            assert!(error.contains("quarantine"), "{error}");
        }
    }
}

#[test]
fn stores_that_do_not_fit_the_group_are_refused() {
    let refused = |change: &dyn Fn(&mut Case)| {
        let mut case = Case::of_codecs("f16", "f16", false, 2);
        change(&mut case);
        run(&case, &mut Attention::new(&case.graph), Isa::detect(), 2).unwrap_err()
    };
    let swapped = refused(&|case| {
        let tiles = &mut case.step.stores[0].layers[0];
        std::mem::swap(&mut tiles.k, &mut tiles.v);
    });
    assert_eq!(swapped, "store 0 has a codec opened for V in place of K");
    let small = refused(&|case| case.step.stores[0].page_bytes = 1000);
    assert_eq!(small, "store 0 has pages of 1000 bytes, too few for its K tiles");
    let tile = refused(&|case| case.step.stores[0].layers[0].v.tile_bytes = 64);
    assert!(tile.starts_with("store 0 has tiles of 64 bytes for V, expected "), "{tile}");
}
