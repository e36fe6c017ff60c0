//! The loadable library of the trellis-coded KV codecs.

opencoti_plugin_api::export_plugin!(kv_codec: opencoti_kv_tcq::TrellisCodecs);
