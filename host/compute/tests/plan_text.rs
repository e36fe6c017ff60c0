//! Plans as text: what people read in logs and tests compare.

use expect_test::expect;
use opencoti_compute::plan::{
    AppendRun, GroupPlan, Mask, PageSet, PageSpan, QueryRotation, Residency, SealRun, Segment,
};

fn span(page: u32, start_pos: u32, len: u32) -> PageSpan {
    PageSpan { page, start_pos, len }
}

#[test]
fn a_plan_reads_as_one_line_for_each_write_and_segment() {
    let plain = Segment {
        queries: vec![0..1, 4..9],
        store: 0,
        pages: PageSet::All(vec![span(3, 0, 128), span(7, 128, 44)]),
        mask: Mask::Causal,
        rotation: QueryRotation::Own,
        residency: Residency::Device,
    };
    let streamed = Segment {
        queries: std::iter::once(0..1).collect(),
        store: 1,
        mask: Mask::Window(512),
        rotation: QueryRotation::Offset(-256),
        residency: Residency::Host,
        ..plain.clone()
    };
    let selected = Segment {
        queries: std::iter::once(2..4).collect(),
        pages: PageSet::PerHead(vec![vec![span(1, 0, 128)], vec![], vec![span(2, 128, 128), span(1, 0, 7)]]),
        mask: Mask::Full,
        rotation: QueryRotation::At(4096),
        ..plain
    };
    let appends = vec![
        AppendRun { rows: 0..1, store: 0, page: 7, first_slot: 43 },
        AppendRun { rows: 4..9, store: 2, page: 11, first_slot: 0 },
    ];
    let seals = vec![SealRun { from_store: 3, from_page: 5, filled: 128, store: 0, page: 3 }];
    let plan = GroupPlan { appends, seals, segments: vec![plain, streamed, selected] };
    expect![[r#"
        write rows 0..1 store 0 p7[43..44]
        write rows 4..9 store 2 p11[0..5]
        seal  store 3 p5+128 as store 0 p3
        read  rows 0..1,4..9 store 0 [p3@0+128 p7@128+44] causal
        read  rows 0..1 store 1 [p3@0+128 p7@128+44] window 512 q-256 host
        read  rows 2..4 store 0 [h0: p1@0+128; h1: ; h2: p2@128+128 p1@0+7] full q@4096
    "#]]
    .assert_eq(&plan.to_string());
}
