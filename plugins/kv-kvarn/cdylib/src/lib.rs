//! The loadable library of the KVarN codecs.

opencoti_plugin_api::export_plugin!(kv_codec: opencoti_kv_kvarn::KvarnCodecs);
