//! The loaded plugins.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use opencoti_plugin_api::Kind;
use opencoti_plugin_api::host::{AdmissionPlugin, CodecPlugin, Instance, ResidencyPlugin, Sink};

use crate::cache::default_cache_folder;
use crate::config::{PluginEntry, RegistryConfig};
use crate::info::{CodecOffer, PluginInfo, State};
use crate::library::{Candidate, PluginFile};
use crate::refusal::{Refusal, nearest};
use crate::select::{Selector, libraries, list};
use crate::sink::TracingSink;

/// The plugins of a config, checked, created and ready. Dropping it ends the instances nobody else holds; the
/// libraries stay mapped.
pub struct Registry {
    plugins: Vec<Loaded>,
}

struct Loaded {
    candidate: Candidate,
    instance: Arc<Instance>,
    face: Face,
}

enum Face {
    Codecs { plugin: CodecPlugin, offers: Vec<CodecOffer> },
    Residency(ResidencyPlugin),
    Admission(AdmissionPlugin),
}

impl Registry {
    /// Loads the plugins of a config; their log lines go to `tracing`.
    ///
    /// # Errors
    /// The first refusal. Nothing stays half loaded, and the same config can be tried again.
    pub fn load(config: &RegistryConfig) -> Result<Self, Refusal> {
        Self::load_with(config, Arc::new(TracingSink::default()))
    }

    /// As [`Registry::load`], with the place for log lines and gauges.
    pub fn load_with(config: &RegistryConfig, sink: Arc<dyn Sink>) -> Result<Self, Refusal> {
        let cache = config.cache.clone().unwrap_or_else(default_cache_folder);
        let mut selector = Selector::new(&config.folders, cache, &config.linked)?;
        let mut registry = Registry { plugins: Vec::new() };
        for entry in &config.plugins {
            if registry.plugins.iter().any(|p| p.candidate.facts.name == entry.name) {
                return Err(Refusal::Twice { name: entry.name.clone() });
            }
            let candidate = selector.resolve(entry)?;
            registry.check_room(&candidate)?;
            registry.plugins.push(start(candidate, entry, Arc::clone(&sink))?);
        }
        Ok(registry)
    }

    /// Only one policy of a kind decides.
    fn check_room(&self, candidate: &Candidate) -> Result<(), Refusal> {
        let kind = candidate.facts.kind;
        if kind == Kind::KvCodec {
            return Ok(());
        }
        match self.plugins.iter().find(|p| p.candidate.facts.kind == kind) {
            Some(first) => Err(Refusal::TwoOfAKind {
                first: first.candidate.facts.name.clone(),
                second: candidate.facts.name.clone(),
                kind: kind.name(),
            }),
            None => Ok(()),
        }
    }

    /// The plugin that offers a codec, and the codec's name in it. `name` is a codec (`q8_0`) or, where several plugins
    /// offer it, `plugin/codec`.
    pub fn codec(&self, name: &str) -> Result<(CodecPlugin, String), Refusal> {
        let (wanted, codec) = match name.split_once('/') {
            Some((plugin, codec)) => (Some(plugin), codec),
            None => (None, name),
        };
        let offers =
            |(p, o): &(&CodecPlugin, &CodecOffer)| o.name == codec && wanted.is_none_or(|w| w == p.instance().name());
        let mut matching = self.offers().filter(offers);
        let Some((first, _)) = matching.next() else { return Err(self.no_codec(name)) };
        match matching.next() {
            Some((second, _)) => Err(Refusal::TwoCodecs {
                codec: codec.to_owned(),
                first: first.instance().name().to_owned(),
                second: second.instance().name().to_owned(),
            }),
            None => Ok((first.clone(), codec.to_owned())),
        }
    }

    fn no_codec(&self, name: &str) -> Refusal {
        let mut names: Vec<_> = self.offers().map(|(_, o)| o.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Refusal::NoCodec {
            codec: name.to_owned(),
            nearest: nearest(name, names.iter().copied()),
            offered: list(&names),
        }
    }

    fn offers(&self) -> impl Iterator<Item = (&CodecPlugin, &CodecOffer)> {
        self.plugins
            .iter()
            .filter_map(|p| match &p.face {
                Face::Codecs { plugin, offers } => Some(offers.iter().map(move |o| (plugin, o))),
                _ => None,
            })
            .flatten()
    }

    /// The residency policy, if one is listed.
    pub fn residency(&self) -> Option<&ResidencyPlugin> {
        self.plugins.iter().find_map(|p| match &p.face {
            Face::Residency(policy) => Some(policy),
            _ => None,
        })
    }

    /// The admission policy, if one is listed.
    pub fn admission(&self) -> Option<&AdmissionPlugin> {
        self.plugins.iter().find_map(|p| match &p.face {
            Face::Admission(policy) => Some(policy),
            _ => None,
        })
    }

    /// The facts of every loaded plugin, in the order of the config.
    pub fn describe(&self) -> Vec<PluginInfo> {
        self.plugins.iter().map(Loaded::describe).collect()
    }
}

impl Loaded {
    fn describe(&self) -> PluginInfo {
        let health = self.instance.health();
        let state = match health.is_quarantined() {
            true => State::Quarantined(health.reason().unwrap_or_default()),
            false => State::Active,
        };
        let codecs = match &self.face {
            Face::Codecs { offers, .. } => offers.clone(),
            _ => Vec::new(),
        };
        PluginInfo { codecs, state, calls: health.calls(), failures: health.failures(), ..available(&self.candidate) }
    }
}

/// Creates the instance of a checked plugin.
fn start(candidate: Candidate, entry: &PluginEntry, sink: Arc<dyn Sink>) -> Result<Loaded, Refusal> {
    let facts = &candidate.facts;
    let create = |e: opencoti_plugin_api::Error| Refusal::Create { name: facts.name.clone(), reason: e.message };
    let unused = || Refusal::UnusedKind { name: facts.name.clone(), kind: facts.kind.name().to_owned() };
    if !matches!(facts.kind, Kind::KvCodec | Kind::ResidencyPolicy | Kind::AdmissionPolicy) {
        return Err(unused());
    }
    let instance = Instance::create(candidate.root, &entry.config_text(), sink).map_err(create)?;
    let face = match facts.kind {
        Kind::KvCodec => {
            let plugin = CodecPlugin::new(Arc::clone(&instance)).map_err(create)?;
            let offers = plugin.codecs().map_err(create)?;
            let offers = offers.into_iter().map(|c| CodecOffer { name: c.name, summary: c.summary }).collect();
            Face::Codecs { plugin, offers }
        }
        Kind::ResidencyPolicy => Face::Residency(ResidencyPlugin::new(Arc::clone(&instance)).map_err(create)?),
        Kind::AdmissionPolicy => Face::Admission(AdmissionPlugin::new(Arc::clone(&instance)).map_err(create)?),
        _ => return Err(unused()),
    };
    tracing::info!(
        plugin = facts.name,
        version = %facts.version,
        kind = facts.kind.name(),
        api = %facts.api,
        layout = facts.layout.text(),
        file = %candidate.place().display(),
        "plugin loaded"
    );
    Ok(Loaded { candidate, instance, face })
}

/// The facts of a checked plugin without an instance.
fn available(candidate: &Candidate) -> PluginInfo {
    let f = &candidate.facts;
    PluginInfo {
        name: f.name.clone(),
        version: f.version.to_string(),
        kind: f.kind.name().to_owned(),
        api: f.api.to_string(),
        path: candidate.path.clone(),
        sha256: candidate.sha256.clone(),
        layout: f.layout.text().to_owned(),
        license: f.license.clone(),
        summary: f.summary.clone(),
        capabilities: f.capabilities.clone(),
        config_schema: f.config_schema.clone(),
        codecs: Vec::new(),
        state: State::Available,
        calls: 0,
        failures: 0,
    }
}

/// Checks a file and says what it is. It is opened (its constructors run) and not created.
pub fn inspect(path: &Path, cache: Option<&Path>) -> Result<PluginInfo, Refusal> {
    let cache = cache.map_or_else(default_cache_folder, Path::to_path_buf);
    Ok(available(&PluginFile::read(path)?.open(&cache)?))
}

/// Every library in the folders with what it is or why it is refused; libraries that are no plugins are left out.
pub fn discover(folders: &[PathBuf], cache: Option<&Path>) -> Vec<(PathBuf, Result<PluginInfo, Refusal>)> {
    let inspected = libraries(folders).into_iter().map(|file| {
        let outcome = inspect(&file, cache);
        (file, outcome)
    });
    inspected.filter(|(_, outcome)| !matches!(outcome, Err(Refusal::NoRoot { .. }))).collect()
}
