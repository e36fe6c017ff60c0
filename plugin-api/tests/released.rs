//! The layouts of released API versions are kept as text in `abi/`, and every one of the major version must agree with
//! this build in both directions: a plugin built for it loads here, and a plugin built from here loads there.

use std::fmt::Write as _;
use std::path::PathBuf;

use opencoti_plugin_api::API_VERSION;
use opencoti_plugin_api::layout::{Layouts, OwnedStruct};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("abi")
}

/// One line for a struct, one for each field: `offset size name type`.
fn render(layouts: &Layouts) -> String {
    let mut out = String::new();
    for s in &layouts.structs {
        let grows = if s.growing { "growing" } else { "frozen" };
        writeln!(out, "{} {grows} size {} align {}", s.name, s.size, s.align).unwrap();
        for (name, ty, offset, size) in &s.fields {
            writeln!(out, "  {offset} {size} {name} {ty}").unwrap();
        }
    }
    out
}

fn parse(text: &str) -> Layouts {
    let mut structs: Vec<OwnedStruct> = Vec::new();
    for line in text.lines() {
        match line.strip_prefix("  ") {
            Some(field) => {
                let parts: Vec<&str> = field.splitn(4, ' ').collect();
                let [offset, size, name, ty] = parts[..] else { panic!("a field has four parts: {line}") };
                let field = (name.to_owned(), ty.to_owned(), offset.parse().unwrap(), size.parse().unwrap());
                structs.last_mut().expect("fields follow a struct").fields.push(field);
            }
            None => {
                let parts: Vec<&str> = line.split(' ').collect();
                let [name, grows, "size", size, "align", align] = parts[..] else { panic!("no struct: {line}") };
                structs.push(OwnedStruct {
                    name: name.to_owned(),
                    growing: grows == "growing",
                    size: size.parse().unwrap(),
                    align: align.parse().unwrap(),
                    fields: Vec::new(),
                });
            }
        }
    }
    Layouts { structs }
}

/// A change of the ABI shows up as a change of this file, next to the version it must come with.
/// `UPDATE_EXPECT=1` writes the file of a new version; that of a released one is never written again.
#[test]
#[cfg(target_pointer_width = "64")]
fn the_layout_of_this_version_is_the_one_on_record() {
    let file = folder().join(format!("{}.{}.txt", API_VERSION.major, API_VERSION.minor));
    expect_test::expect_file![file].assert_eq(&render(&Layouts::ours()));
}

#[test]
#[cfg(target_pointer_width = "64")]
fn every_released_layout_of_this_major_version_agrees_in_both_directions() {
    let ours = Layouts::ours();
    let mut seen = 0;
    for minor in 0..=API_VERSION.minor {
        let file = folder().join(format!("{}.{minor}.txt", API_VERSION.major));
        let released = parse(&std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())));
        assert_eq!(ours.check_against(&released), Ok(()), "{}", file.display());
        assert_eq!(released.check_against(&ours), Ok(()), "{}", file.display());
        seen += released.structs.len();
    }
    assert!(seen >= 20, "the records are not empty");
}

#[test]
fn a_record_reads_back_as_it_was() {
    let ours = Layouts::ours();
    assert_eq!(parse(&render(&ours)), ours);
}
