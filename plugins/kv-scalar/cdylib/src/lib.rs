//! The loadable library of the scalar KV codecs.

opencoti_plugin_api::export_plugin!(kv_codec: opencoti_kv_scalar::ScalarCodecs);
