//! `GET /debug/trace`: the last steps as Chrome's trace events, to be opened in a viewer of such files.
//!
//! Row 0 is the engine thread: what it plans, runs and delivers. The rows below are the slots, and who took part in a step with
//! how many tokens.

use axum::Json;
use opencoti_engine::trace::{StepTrace, TracedRows};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::state::Ready;

/// A trace in Chrome's format; times are microseconds.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trace {
    trace_events: Vec<Value>,
    display_time_unit: &'static str,
}

/// Row of the engine thread; those of slots follow, then that of embeddings.
const ENGINE: u32 = 0;

fn span(name: &str, row: u32, from: u64, to: u64, args: &Value) -> Value {
    json!({"ph": "X", "pid": 1, "tid": row, "name": name, "ts": from, "dur": to.saturating_sub(from), "args": args})
}

fn row_name(row: u32, name: &str) -> Value {
    json!({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}})
}

fn of_step(step: &StepTrace, n_slots: u32, out: &mut Vec<Value>) {
    let tokens: u32 = step.rows.iter().map(|rows| rows.tokens).sum();
    out.push(span("plan", ENGINE, step.began, step.planned, &json!({})));
    out.push(span("run", ENGINE, step.planned, step.ran, &json!({"tokens": tokens})));
    out.push(span("deliver", ENGINE, step.ran, step.ended, &json!({})));
    out.push(json!({"ph": "C", "pid": 1, "name": "waiting", "ts": step.began, "args": {"requests": step.waiting}}));
    out.extend(step.rows.iter().map(|rows: &TracedRows| {
        let name = match (rows.slot, rows.decodes) {
            (None, _) => "embed",
            (Some(_), true) => "decode",
            (Some(_), false) => "prefill",
        };
        let row = 1 + rows.slot.unwrap_or(n_slots);
        span(name, row, step.planned, step.ran, &json!({"tokens": rows.tokens, "request": rows.request}))
    }));
}

fn trace(steps: &[StepTrace], n_slots: u32) -> Trace {
    let slots = (0..n_slots).map(|slot| row_name(1 + slot, &format!("slot {slot}")));
    let mut events: Vec<Value> = std::iter::once(row_name(ENGINE, "engine"))
        .chain(slots)
        .chain(std::iter::once(row_name(1 + n_slots, "embeddings")))
        .collect();
    steps.iter().for_each(|step| of_step(step, n_slots, &mut events));
    Trace { trace_events: events, display_time_unit: "ms" }
}

/// Handler of the route.
pub(crate) async fn get(ready: Ready) -> Result<Json<Trace>, ApiError> {
    let steps = ready.engine.trace().await?;
    Ok(Json(trace(&steps, ready.engine.info().n_slots)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_three_spans_of_the_engine_and_one_of_each_who_took_part() {
        let rows = |slot, tokens, decodes| TracedRows { slot, request: 7, tokens, decodes };
        let step = StepTrace {
            began: 10,
            planned: 12,
            ran: 40,
            ended: 45,
            waiting: 3,
            rows: vec![rows(Some(1), 1, true), rows(Some(0), 64, false), rows(None, 9, false)],
        };
        let trace = serde_json::to_value(trace(&[step], 2)).expect("a trace is JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        let spans: Vec<(&str, u64, u64, u64)> = events
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| {
                let number = |key: &str| e[key].as_u64().expect("a number");
                (e["name"].as_str().expect("a name"), number("tid"), number("ts"), number("dur"))
            })
            .collect();
        assert_eq!(
            spans,
            [
                ("plan", 0, 10, 2),
                ("run", 0, 12, 28),
                ("deliver", 0, 40, 5),
                ("decode", 2, 12, 28),
                ("prefill", 1, 12, 28),
                ("embed", 3, 12, 28),
            ]
        );
        assert_eq!(events.iter().filter(|e| e["ph"] == "M").count(), 4);
        assert_eq!(events.iter().find(|e| e["ph"] == "C").expect("a counter")["args"]["requests"], 3);
    }
}
