//! The loadable library of `admission-gate`: its root and layout table, nothing else.

opencoti_plugin_api::export_plugin!(admission_policy: opencoti_admission_gate::Gate);
