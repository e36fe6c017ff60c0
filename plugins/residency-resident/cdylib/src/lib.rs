//! The loadable library of `residency-resident`: its root and layout table, nothing else.

opencoti_plugin_api::export_plugin!(residency_policy: opencoti_residency_resident::Resident);
