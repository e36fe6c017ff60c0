//! The header of a state file: what its pages and planes mean. Little-endian; texts and lists begin with their length.

use opencoti_compute::graph::{KvGeometry, StateGeometry};
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_plugin_api::host::Codec;

use super::{ModelFingerprint, StateError};
use crate::config::CacheConfig;
use crate::store::Store;

/// Everything but the pages and planes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) model: ModelFingerprint,
    pub(super) shape: Shape,
    pub(super) tokens: Vec<u32>,
    /// Pages, by group.
    pub(super) pages: Vec<Vec<FilePage>>,
    /// The sequence, then its snapshots by their length.
    pub(super) members: Vec<Member>,
}

/// A page of a file: its tiles as the group's codecs laid them out, then those of exact tokens, as far as they are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FilePage {
    /// Slots filled.
    pub(super) filled: u32,
    /// [`RECORD`], [`EXACT`] or both.
    pub(super) parts: u32,
}

/// Tiles of the group's codecs.
pub(super) const RECORD: u32 = 1;
/// Tiles of exact tokens.
pub(super) const EXACT: u32 = 2;

impl FilePage {
    pub(super) fn has(&self, part: u32) -> bool {
        self.parts & part != 0
    }
}

/// The sequence or a snapshot of it: its first tokens, and where their keys and values are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Member {
    pub(super) n_tokens: u32,
    pub(super) tables: Vec<Vec<Span>>,
}

/// Positions `start ..` are in the first `len` slots of a page of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) page: u32,
    pub(super) start: u32,
    pub(super) len: u32,
}

/// What must be equal for pages to be of use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    page_tokens: u32,
    groups: Vec<GroupShape>,
    states: Vec<StateGeometry>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct GroupShape {
    geometry: KvGeometry,
    n_layers: u64,
    page_bytes: u64,
    k: CodecShape,
    v: CodecShape,
    stage: Option<StageShape>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct StageShape {
    page_bytes: u64,
    k: CodecShape,
    v: CodecShape,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct CodecShape {
    name: String,
    options: String,
    plugin: String,
    version: String,
}

impl Shape {
    pub(super) fn of(config: &CacheConfig, stores: &[Store]) -> Self {
        let groups = config.groups.iter().zip(stores).map(|(group, store)| GroupShape {
            geometry: group.geometry,
            n_layers: group.n_layers as u64,
            page_bytes: store.view.page_bytes as u64,
            k: CodecShape::of(&group.k, &store.channels),
            v: CodecShape::of(&group.v, &store.channels),
            stage: store.stage.as_ref().zip(group.stage.as_ref()).map(|(stage, config)| StageShape {
                page_bytes: stage.view.page_bytes as u64,
                k: CodecShape::of(&config.k, ""),
                v: CodecShape::of(&config.v, ""),
            }),
        });
        let states = config.states.layers.clone();
        Shape { page_tokens: PAGE_TOKENS as u32, groups: groups.collect(), states }
    }

    /// Whether its model keeps recurrent state.
    pub(super) fn has_state(&self) -> bool {
        !self.states.is_empty()
    }

    /// Names the first thing in which the file (`self`) differs from what is there.
    pub(super) fn check(&self, expected: &Shape) -> Result<(), StateError> {
        same("pages in tokens of", self.page_tokens, expected.page_tokens)?;
        same("cache groups in number", self.groups.len(), expected.groups.len())?;
        for (i, (found, expected)) in self.groups.iter().zip(&expected.groups).enumerate() {
            let of = |what: &str| format!("{what} of cache group {i}:");
            same(of("the geometry"), describe(&found.geometry), describe(&expected.geometry))?;
            same(of("the number of layers"), found.n_layers, expected.n_layers)?;
            same(of("the K codec"), found.k.describe(), expected.k.describe())?;
            same(of("the V codec"), found.v.describe(), expected.v.describe())?;
            same(of("the page size in bytes"), found.page_bytes, expected.page_bytes)?;
            let stage = |shape: &GroupShape| shape.stage.as_ref().map_or("none".to_owned(), StageShape::describe);
            same(of("the stage of exact tokens"), stage(found), stage(expected))?;
        }
        same("recurrent layers in number", self.states.len(), expected.states.len())?;
        for (i, (found, expected)) in self.states.iter().zip(&expected.states).enumerate() {
            let words = |g: &StateGeometry| format!("{} + {} words", g.conv, g.recurrent);
            same(format!("the state of recurrent layer {i} of"), words(found), words(expected))?;
        }
        Ok(())
    }
}

impl StageShape {
    fn describe(&self) -> String {
        format!("pages of {} bytes, K {}, V {}", self.page_bytes, self.k.describe(), self.v.describe())
    }
}

impl CodecShape {
    fn of(codec: &Codec, channels: &str) -> Self {
        let options = match channels {
            "" => codec.options().to_owned(),
            table => format!("{} and channels of {table}", codec.options()),
        };
        CodecShape {
            name: codec.name().to_owned(),
            options,
            plugin: codec.plugin().name().to_owned(),
            version: codec.plugin().version(),
        }
    }

    fn describe(&self) -> String {
        format!("`{}` with options {} of plugin `{}` {}", self.name, self.options, self.plugin, self.version)
    }
}

fn describe(g: &KvGeometry) -> String {
    let window = g.window.map_or("no window".to_owned(), |w| format!("a window of {w}"));
    format!("{} KV heads of {} and {} values, {window}", g.n_kv_heads, g.k_head_dim, g.v_head_dim)
}

fn same<T: PartialEq + ToString>(what: impl Into<String>, found: T, expected: T) -> Result<(), StateError> {
    match found == expected {
        true => Ok(()),
        false => {
            Err(StateError::Mismatch { what: what.into(), found: found.to_string(), expected: expected.to_string() })
        }
    }
}

impl Header {
    pub(super) fn check_model(&self, model: &ModelFingerprint) -> Result<(), StateError> {
        let short = |m: &ModelFingerprint| {
            let digest: String = m.digest[..6].iter().map(|b| format!("{b:02x}")).collect();
            format!("`{}` ({digest}…)", m.name)
        };
        match self.model.digest == model.digest {
            true => Ok(()),
            false => same("model", short(&self.model), short(model)),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.text(&self.model.name);
        out.0.extend_from_slice(&self.model.digest);
        out.u32(self.shape.page_tokens);
        out.u32(self.shape.groups.len() as u32);
        for group in &self.shape.groups {
            let g = &group.geometry;
            for n in [g.n_kv_heads, g.k_head_dim, g.v_head_dim, g.window.unwrap_or(0)] {
                out.u64(n as u64);
            }
            out.u64(group.n_layers);
            out.u64(group.page_bytes);
            out.codecs(&group.k, &group.v);
            // Pages without a byte are none.
            out.u64(group.stage.as_ref().map_or(0, |stage| stage.page_bytes));
            if let Some(stage) = &group.stage {
                out.codecs(&stage.k, &stage.v);
            }
        }
        out.u32(self.tokens.len() as u32);
        self.tokens.iter().for_each(|&t| out.u32(t));
        out.u32(self.shape.states.len() as u32);
        for layer in &self.shape.states {
            out.u64(layer.conv as u64);
            out.u64(layer.recurrent as u64);
        }
        for pages in &self.pages {
            out.u32(pages.len() as u32);
            pages.iter().flat_map(|page| [page.filled, page.parts]).for_each(|n| out.u32(n));
        }
        out.u32(self.members.len() as u32);
        for member in &self.members {
            out.u32(member.n_tokens);
            for table in &member.tables {
                out.u32(table.len() as u32);
                table.iter().flat_map(|s| [s.page, s.start, s.len]).for_each(|n| out.u32(n));
            }
        }
        out.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let mut input = Reader(bytes);
        let name = input.text()?;
        let digest = input.take(32)?.try_into().expect("as many bytes as asked for");
        let page_tokens = input.u32()?;
        // Each list is bounded by the bytes that its elements take at least.
        let n_groups = input.count(7 * 8 + 8 * 4)?;
        let groups = (0..n_groups).map(|_| input.group()).collect::<Result<_, _>>()?;
        let tokens = input.list()?;
        let n_states = input.count(2 * 8)?;
        let state = |input: &mut Reader| Ok(StateGeometry { conv: input.usize()?, recurrent: input.usize()? });
        let states = (0..n_states).map(|_| state(&mut input)).collect::<Result<_, StateError>>()?;
        let pages = (0..n_groups).map(|_| input.pages()).collect::<Result<_, _>>()?;
        let n_members = input.count(4 + 4 * n_groups)?;
        let members = (0..n_members).map(|_| input.member(n_groups)).collect::<Result<_, _>>()?;
        match input.0 {
            [] => Ok(Header {
                model: ModelFingerprint { name, digest },
                shape: Shape { page_tokens, groups, states },
                tokens,
                pages,
                members,
            }),
            _ => Err(StateError::Malformed("there is more in it than belongs there")),
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, n: u32) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    fn u64(&mut self, n: u64) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    fn codecs(&mut self, k: &CodecShape, v: &CodecShape) {
        for codec in [k, v] {
            for text in [&codec.name, &codec.options, &codec.plugin, &codec.version] {
                self.text(text);
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.0.extend_from_slice(text.as_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], StateError> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(StateError::Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, StateError> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("as many bytes as asked for")))
    }

    fn u64(&mut self) -> Result<u64, StateError> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("as many bytes as asked for")))
    }

    fn usize(&mut self) -> Result<usize, StateError> {
        usize::try_from(self.u64()?).map_err(|_| StateError::Malformed("a size is beyond any memory"))
    }

    /// A number of elements of at least `each` bytes.
    fn count(&mut self, each: usize) -> Result<usize, StateError> {
        let n = self.u32()? as usize;
        match n.checked_mul(each).is_some_and(|bytes| bytes <= self.0.len()) {
            true => Ok(n),
            false => Err(StateError::Malformed("a list is longer than the header")),
        }
    }

    fn text(&mut self) -> Result<String, StateError> {
        let n = self.count(1)?;
        let bytes = self.take(n)?.to_vec();
        String::from_utf8(bytes).map_err(|_| StateError::Malformed("a text is not UTF-8"))
    }

    fn group(&mut self) -> Result<GroupShape, StateError> {
        let geometry = KvGeometry {
            n_kv_heads: self.usize()?,
            k_head_dim: self.usize()?,
            v_head_dim: self.usize()?,
            window: Some(self.usize()?).filter(|&w| w > 0),
        };
        let (n_layers, page_bytes, k, v) = (self.u64()?, self.u64()?, self.codec()?, self.codec()?);
        let stage = match self.u64()? {
            0 => None,
            page_bytes => Some(StageShape { page_bytes, k: self.codec()?, v: self.codec()? }),
        };
        Ok(GroupShape { geometry, n_layers, page_bytes, k, v, stage })
    }

    fn pages(&mut self) -> Result<Vec<FilePage>, StateError> {
        let n = self.count(8)?;
        (0..n).map(|_| Ok(FilePage { filled: self.u32()?, parts: self.u32()? })).collect()
    }

    fn codec(&mut self) -> Result<CodecShape, StateError> {
        Ok(CodecShape { name: self.text()?, options: self.text()?, plugin: self.text()?, version: self.text()? })
    }

    fn list(&mut self) -> Result<Vec<u32>, StateError> {
        let n = self.count(4)?;
        (0..n).map(|_| self.u32()).collect()
    }

    fn member(&mut self, n_groups: usize) -> Result<Member, StateError> {
        let n_tokens = self.u32()?;
        let tables = (0..n_groups).map(|_| self.table()).collect::<Result<_, _>>()?;
        Ok(Member { n_tokens, tables })
    }

    fn table(&mut self) -> Result<Vec<Span>, StateError> {
        let n = self.count(12)?;
        (0..n).map(|_| Ok(Span { page: self.u32()?, start: self.u32()?, len: self.u32()? })).collect()
    }
}
