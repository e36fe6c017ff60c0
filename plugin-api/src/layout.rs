//! Layout tables and the two-way compatibility check.
//!
//! A checker that asks "is the host's struct a prefix of the plugin's" refuses every plugin built before a field was
//! added. Compatibility is symmetric: for each struct both sides know, the fields of one must be a prefix of the
//! other's. A newer plugin in an older host has fields nobody asks for; an older plugin in a newer host lacks fields
//! that the host reads through [`crate::field_or_none!`] or replaces by defaults when it copies a table.

use crate::admission::{AdmissionDecision, AdmissionPolicyVtbl, AdmissionRequest, AdmissionSnapshot, StoreState};
use crate::cpu_tiles::CpuTilesVtbl;
use crate::device_source::{DeviceSource, DeviceSourceVtbl};
use crate::host::HostServices;
use crate::kv_codec::{CodecInfo, CodecLayout, CodecParams, KvCodecVtbl};
use crate::residency::{GroupState, ResidencyDecision, ResidencyPolicyVtbl, ResidencySnapshot};
use crate::root::{API_VERSION, ApiVersion, Manifest, PluginRoot};
use crate::text::{Str, TextBuf};

/// One field of an ABI struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldLayout {
    /// Name in the source.
    pub name: Str,
    /// Type as source text, without names of arguments and without spaces that carry no meaning.
    pub ty: Str,
    /// Bytes from the start of the struct.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
}

/// One ABI struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StructLayout {
    /// Name in the source.
    pub name: Str,
    /// 1 when later minor versions may add fields at the end, 0 when frozen.
    pub growing: u32,
    /// Bytes.
    pub size: u32,
    /// Alignment in bytes.
    pub align: u32,
    /// Number of `fields`.
    pub n_fields: u32,
    /// The fields in order.
    pub fields: *const FieldLayout,
}

// SAFETY: points to constants only.
unsafe impl Send for StructLayout {}
// SAFETY: points to constants only.
unsafe impl Sync for StructLayout {}

impl StructLayout {
    /// Used by the derive macro.
    pub const fn new(
        name: &'static str,
        growing: bool,
        size: usize,
        align: usize,
        fields: &'static [FieldLayout],
    ) -> Self {
        StructLayout {
            name: Str::from_static(name),
            growing: growing as u32,
            size: size as u32,
            align: align as u32,
            n_fields: fields.len() as u32,
            fields: fields.as_ptr(),
        }
    }
}

/// All structs of the API version a plugin was built with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LayoutTable {
    /// The version of the API crate.
    pub api: ApiVersion,
    /// Number of `structs`.
    pub n_structs: u32,
    /// The structs, in no particular order.
    pub structs: *const StructLayout,
}

// SAFETY: points to constants only.
unsafe impl Send for LayoutTable {}
// SAFETY: points to constants only.
unsafe impl Sync for LayoutTable {}

/// A struct that crosses the boundary. Derived only.
pub trait AbiLayout {
    /// Its fields in order.
    const FIELDS: &'static [FieldLayout];
    /// Its layout.
    const LAYOUT: StructLayout;
}

const STRUCTS: &[StructLayout] = &[
    Str::LAYOUT,
    TextBuf::LAYOUT,
    ApiVersion::LAYOUT,
    Manifest::LAYOUT,
    PluginRoot::LAYOUT,
    HostServices::LAYOUT,
    KvCodecVtbl::LAYOUT,
    CodecInfo::LAYOUT,
    CodecParams::LAYOUT,
    CodecLayout::LAYOUT,
    CpuTilesVtbl::LAYOUT,
    DeviceSourceVtbl::LAYOUT,
    DeviceSource::LAYOUT,
    ResidencyPolicyVtbl::LAYOUT,
    GroupState::LAYOUT,
    ResidencySnapshot::LAYOUT,
    ResidencyDecision::LAYOUT,
    AdmissionPolicyVtbl::LAYOUT,
    StoreState::LAYOUT,
    AdmissionRequest::LAYOUT,
    AdmissionSnapshot::LAYOUT,
    AdmissionDecision::LAYOUT,
];

/// The table of this build of the API.
pub static LAYOUT_TABLE: LayoutTable =
    LayoutTable { api: API_VERSION, n_structs: STRUCTS.len() as u32, structs: STRUCTS.as_ptr() };

/// A layout table in owned form, as read from a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layouts {
    /// The structs in the order of the table.
    pub structs: Vec<OwnedStruct>,
}

/// A [`StructLayout`] in owned form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedStruct {
    /// Name in the source.
    pub name: String,
    /// Whether later minor versions may add fields.
    pub growing: bool,
    /// Bytes.
    pub size: u32,
    /// Alignment.
    pub align: u32,
    /// `(name, type, offset, size)` in order.
    pub fields: Vec<(String, String, u32, u32)>,
}

/// Tables larger than these are not layout tables but garbage behind a symbol of the right name.
const MAX_STRUCTS: u32 = 4096;
const MAX_FIELDS: u32 = 1024;
const MAX_NAME: usize = 4096;

impl Layouts {
    /// The table of this build.
    pub fn ours() -> Self {
        // SAFETY: our own static table.
        unsafe { Self::read(&LAYOUT_TABLE) }.expect("the table of this build is within its own bounds")
    }

    /// Copies a plugin's table. `None` when it can't be one.
    ///
    /// # Safety
    /// `table` must come from a plugin that claims this API; its pointers are followed.
    pub unsafe fn read(table: *const LayoutTable) -> Option<Self> {
        // SAFETY: promised by the caller.
        let table = unsafe { table.as_ref() }?;
        if table.n_structs > MAX_STRUCTS || table.structs.is_null() {
            return None;
        }
        // SAFETY: as above; the count is bounded.
        let structs = unsafe { core::slice::from_raw_parts(table.structs, table.n_structs as usize) };
        let structs = structs
            .iter()
            // SAFETY: as above.
            .map(|s| unsafe { read_struct(s) })
            .collect::<Option<Vec<_>>>()?;
        Some(Layouts { structs })
    }

    /// Compares with another side's table; the error names the first struct and field that differ.
    ///
    /// Structs that only one side knows belong to kinds or extensions the other does not use.
    pub fn check_against(&self, found: &Layouts) -> Result<(), String> {
        for expected in &self.structs {
            if let Some(found) = found.structs.iter().find(|s| s.name == expected.name) {
                compare(expected, found)?;
            }
        }
        Ok(())
    }
}

unsafe fn read_struct(s: &StructLayout) -> Option<OwnedStruct> {
    if s.n_fields > MAX_FIELDS || (s.fields.is_null() && s.n_fields > 0) {
        return None;
    }
    let fields = if s.n_fields == 0 {
        &[]
    } else {
        // SAFETY: bounded count, pointer promised by the caller of `read`.
        unsafe { core::slice::from_raw_parts(s.fields, s.n_fields as usize) }
    };
    let text = |t: &Str| {
        (t.len <= MAX_NAME).then(|| {
            // SAFETY: as above; the length is bounded.
            unsafe { t.to_string_lossy() }
        })
    };
    Some(OwnedStruct {
        name: text(&s.name)?,
        growing: s.growing != 0,
        size: s.size,
        align: s.align,
        fields: fields.iter().map(|f| Some((text(&f.name)?, text(&f.ty)?, f.offset, f.size))).collect::<Option<_>>()?,
    })
}

fn compare(expected: &OwnedStruct, found: &OwnedStruct) -> Result<(), String> {
    let name = &expected.name;
    for (i, (e, f)) in expected.fields.iter().zip(&found.fields).enumerate() {
        if e != f {
            return Err(format!(
                "field {i} `{}` of `{name}`: expected `{}: {}` at offset {}, found `{}: {}` at offset {}",
                e.0, e.0, e.1, e.2, f.0, f.1, f.2
            ));
        }
    }
    let same_fields = expected.fields.len() == found.fields.len();
    if expected.growing != found.growing || expected.align != found.align {
        return Err(format!("`{name}`: expected {}, found {}", frame(expected), frame(found)));
    }
    let sizes_fit = expected.size == found.size || (expected.growing && !same_fields);
    if !sizes_fit || (!same_fields && !expected.growing) {
        return Err(format!(
            "`{name}`: expected {} fields in {} bytes, found {} fields in {} bytes, and {}",
            expected.fields.len(),
            expected.size,
            found.fields.len(),
            found.size,
            if expected.growing { "equal fields must make equal sizes" } else { "a frozen struct never changes" },
        ));
    }
    Ok(())
}

fn frame(s: &OwnedStruct) -> String {
    format!("a {} struct aligned to {}", if s.growing { "growing" } else { "frozen" }, s.align)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grown(mut layouts: Layouts, name: &str) -> Layouts {
        let s = layouts.structs.iter_mut().find(|s| s.name == name).unwrap();
        s.fields.push(("later".into(), "u64".into(), s.size, 8));
        s.size += 8;
        layouts
    }

    #[test]
    fn a_table_agrees_with_itself() {
        assert_eq!(Layouts::ours().check_against(&Layouts::ours()), Ok(()));
    }

    #[test]
    fn an_added_field_is_accepted_in_both_directions() {
        let ours = Layouts::ours();
        let newer = grown(ours.clone(), "KvCodecVtbl");
        assert_eq!(ours.check_against(&newer), Ok(()));
        assert_eq!(newer.check_against(&ours), Ok(()));
    }

    #[test]
    fn a_changed_signature_of_equal_size_is_refused_in_both_directions() {
        let ours = Layouts::ours();
        let mut changed = ours.clone();
        let s = changed.structs.iter_mut().find(|s| s.name == "KvCodecVtbl").unwrap();
        let f = s.fields.iter_mut().find(|f| f.0 == "append").unwrap();
        assert!(f.1.contains("*mut u8"), "{}", f.1);
        f.1 = f.1.replace("*mut u8", "*mut u16");
        for (host, plugin) in [(&ours, &changed), (&changed, &ours)] {
            let message = host.check_against(plugin).unwrap_err();
            assert!(message.contains("`append` of `KvCodecVtbl`"), "{message}");
        }
    }

    #[test]
    fn a_frozen_struct_may_not_grow() {
        let ours = Layouts::ours();
        let newer = grown(ours.clone(), "StoreState");
        assert!(ours.check_against(&newer).unwrap_err().contains("a frozen struct never changes"));
    }

    #[test]
    fn an_inserted_field_is_refused() {
        let ours = Layouts::ours();
        let mut changed = ours.clone();
        let s = changed.structs.iter_mut().find(|s| s.name == "Manifest").unwrap();
        s.fields.remove(1);
        assert!(ours.check_against(&changed).is_err());
    }
}
