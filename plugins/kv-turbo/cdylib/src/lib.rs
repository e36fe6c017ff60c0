//! The loadable library of the turbo KV codecs.

opencoti_plugin_api::export_plugin!(kv_codec: opencoti_kv_turbo::TurboCodecs);
