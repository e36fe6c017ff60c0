//! `GET /debug/prefixes`: the tree of prefixes that the cache holds.

use axum::Json;
use opencoti_engine::api::PrefixNode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::Ready;

/// A run of tokens that the same sequences have.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Node {
    /// Index of the node that it goes on with; null at the beginning.
    parent: Option<usize>,
    /// Position of its first token.
    from: usize,
    n_tokens: usize,
    /// Sequences that have it: those that run, pools, what is kept for reuse, and snapshots.
    n_sequences: usize,
    /// Of these, those that run and pools.
    n_live: usize,
    n_snapshots: usize,
    /// How often another sequence began with one of them.
    hits: u64,
}

impl From<PrefixNode> for Node {
    fn from(node: PrefixNode) -> Self {
        Node {
            parent: node.parent,
            from: node.from,
            n_tokens: node.to - node.from,
            n_sequences: node.sequences,
            n_live: node.live,
            n_snapshots: node.snapshots,
            hits: node.hits,
        }
    }
}

/// Handler of the route.
pub(crate) async fn get(ready: Ready) -> Result<Json<Vec<Node>>, ApiError> {
    Ok(Json(ready.engine.prefixes().await?.into_iter().map(Node::from).collect()))
}
