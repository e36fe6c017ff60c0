//! Where a plugin's log lines and gauges go.

use opencoti_plugin_api::host::{LOG_DEBUG, LOG_ERROR, LOG_INFO, LOG_WARN, Sink};

/// A gauge callback: plugin, gauge, value.
type Gauge = Box<dyn Fn(&str, &str, f64) + Send + Sync>;

/// Sends log lines to `tracing`, under the target `plugin`, and gauges to a callback.
#[derive(Default)]
pub struct TracingSink {
    gauge: Option<Gauge>,
}

impl TracingSink {
    /// A sink that hands gauges to `gauge` as `(plugin, name, value)`.
    pub fn with_gauges(gauge: impl Fn(&str, &str, f64) + Send + Sync + 'static) -> Self {
        TracingSink { gauge: Some(Box::new(gauge)) }
    }
}

impl Sink for TracingSink {
    fn log(&self, plugin: &str, level: u32, message: &str) {
        match level {
            LOG_ERROR => tracing::error!(target: "plugin", plugin, "{message}"),
            LOG_WARN => tracing::warn!(target: "plugin", plugin, "{message}"),
            LOG_INFO => tracing::info!(target: "plugin", plugin, "{message}"),
            LOG_DEBUG => tracing::debug!(target: "plugin", plugin, "{message}"),
            _ => tracing::trace!(target: "plugin", plugin, "{message}"),
        }
    }

    fn gauge(&self, plugin: &str, name: &str, value: f64) {
        if let Some(gauge) = &self.gauge {
            gauge(plugin, name, value);
        }
    }
}
