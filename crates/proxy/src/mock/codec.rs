//! The bodies of the pretended providers: completions, streams of them, and errors.

use super::quota::{Counted, Exceeded};
use super::{Api, Call};
use crate::codec::{ErrorText, Json, error_body, json};
use crate::profile::Format;

/// A stream sends its output in at most this many pieces.
const PIECES_MAX: u64 = 64;

/// The text of some tokens.
fn words(tokens: u64) -> String {
    "tide ".repeat(usize::try_from(tokens.min(1 << 20)).unwrap_or(0))
}

/// A complete response.
pub(super) fn completion(call: &Call) -> String {
    let text = words(call.tokens.output);
    let id = call.number;
    let body = match call.api {
        Api::Chat => json!({
            "id": format!("chatcmpl-{id}"), "object": "chat.completion", "created": call.created,
            "model": call.model,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null, "finish_reason": "stop"}],
            "usage": chat_usage(call),
        }),
        Api::Responses => response(call, "completed", Some(&text)),
        Api::Messages => json!({
            "id": format!("msg_{id}"), "type": "message", "role": "assistant", "model": call.model,
            "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": message_usage(call, call.tokens.output),
        }),
        Api::Gemini => gemini(call, &text, true),
        Api::Other => json!({"ok": true}),
    };
    body.to_string()
}

fn chat_usage(call: &Call) -> Json {
    let (input, output) = (call.tokens.input, call.tokens.output);
    json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
        "prompt_tokens_details": {"cached_tokens": 0}})
}

fn message_usage(call: &Call, output: u64) -> Json {
    json!({"input_tokens": call.tokens.input, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0, "output_tokens": output})
}

fn response(call: &Call, status: &str, text: Option<&str>) -> Json {
    let (input, output) = (call.tokens.input, call.tokens.output);
    let item = |text: &str| {
        json!({"id": format!("msg_{}", call.number), "type": "message", "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]})
    };
    let usage = text.map(|_| {
        json!({"input_tokens": input, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": input + output})
    });
    json!({
        "id": format!("resp_{}", call.number), "object": "response", "created_at": call.created,
        "status": status, "error": null, "incomplete_details": null, "instructions": null,
        "max_output_tokens": call.tokens.output_max, "model": call.model,
        "output": text.map(item).into_iter().collect::<Vec<_>>(), "parallel_tool_calls": true,
        "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0, "metadata": {}, "usage": usage,
    })
}

fn gemini(call: &Call, text: &str, is_last: bool) -> Json {
    let (input, output) = (call.tokens.input, call.tokens.output);
    let mut candidate = json!({"content": {"role": "model", "parts": [{"text": text}]}, "index": 0});
    let mut body = json!({"modelVersion": call.model, "responseId": call.number.to_string()});
    if is_last {
        candidate["finishReason"] = json!("STOP");
        body["usageMetadata"] = json!({"promptTokenCount": input, "candidatesTokenCount": output,
            "totalTokenCount": input + output});
    }
    body["candidates"] = json!([candidate]);
    body
}

/// The events of a stream, each as it is sent.
pub(super) fn events(call: &Call) -> Vec<String> {
    match call.api {
        Api::Chat | Api::Other => chat_events(call),
        Api::Responses => response_events(call),
        Api::Messages => message_events(call),
        Api::Gemini => {
            let pieces = pieces(call.tokens.output);
            let last = pieces.len() - 1;
            let event = |(at, text): (usize, &String)| data(&gemini(call, text, at == last));
            pieces.iter().enumerate().map(event).collect()
        }
    }
}

/// The text of the output in a few pieces, at least one.
fn pieces(output: u64) -> Vec<String> {
    let count = output.clamp(1, PIECES_MAX);
    (0..count).map(|at| words(output / count + u64::from(at < output % count))).collect()
}

fn data(body: &Json) -> String {
    format!("data: {body}\n\n")
}

fn event(body: &Json) -> String {
    format!("event: {}\ndata: {body}\n\n", body["type"].as_str().unwrap_or_default())
}

fn chat_events(call: &Call) -> Vec<String> {
    let chunk = |choices: Json, usage: Option<Json>| {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", call.number), "object": "chat.completion.chunk",
            "created": call.created, "model": call.model, "choices": choices,
        });
        if call.reports_usage {
            chunk["usage"] = usage.unwrap_or(Json::Null);
        }
        data(&chunk)
    };
    let choice = |delta: Json, finish: Option<&str>| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
    let mut events = vec![chunk(choice(json!({"role": "assistant", "content": ""}), None), None)];
    let text = pieces(call.tokens.output);
    events.extend(text.iter().map(|text| chunk(choice(json!({"content": text}), None), None)));
    events.push(chunk(choice(json!({}), Some("stop")), None));
    if call.reports_usage {
        events.push(chunk(json!([]), Some(chat_usage(call))));
    }
    events.push("data: [DONE]\n\n".to_owned());
    events
}

fn response_events(call: &Call) -> Vec<String> {
    let item = format!("msg_{}", call.number);
    let all = words(call.tokens.output);
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    let message = |status: &str, content: Json| json!({"id": item, "type": "message", "role": "assistant", "status": status, "content": content});
    let mut bodies = vec![
        json!({"type": "response.created", "response": response(call, "in_progress", None)}),
        json!({"type": "response.output_item.added", "output_index": 0, "item": message("in_progress", json!([]))}),
        json!({"type": "response.content_part.added", "item_id": item, "output_index": 0, "content_index": 0, "part": part("")}),
    ];
    let text = pieces(call.tokens.output);
    bodies.extend(text.iter().map(|text| {
        json!({"type": "response.output_text.delta", "item_id": item, "output_index": 0, "content_index": 0, "delta": text, "logprobs": []})
    }));
    bodies.extend([
        json!({"type": "response.output_text.done", "item_id": item, "output_index": 0, "content_index": 0, "text": all, "logprobs": []}),
        json!({"type": "response.content_part.done", "item_id": item, "output_index": 0, "content_index": 0, "part": part(&all)}),
        json!({"type": "response.output_item.done", "output_index": 0, "item": message("completed", json!([part(&all)]))}),
        json!({"type": "response.completed", "response": response(call, "completed", Some(&all))}),
    ]);
    for (number, body) in bodies.iter_mut().enumerate() {
        body["sequence_number"] = json!(number);
    }
    bodies.iter().map(event).collect()
}

fn message_events(call: &Call) -> Vec<String> {
    let start = json!({"type": "message_start", "message": {
        "id": format!("msg_{}", call.number), "type": "message", "role": "assistant", "model": call.model,
        "content": [], "stop_reason": null, "stop_sequence": null, "usage": message_usage(call, 1)}});
    let block =
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
    let mut bodies = vec![start, block];
    let text = pieces(call.tokens.output);
    bodies.extend(text.iter().map(|text| {
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    }));
    bodies.extend([
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
            "usage": {"output_tokens": call.tokens.output}}),
        json!({"type": "message_stop"}),
    ]);
    bodies.iter().map(event).collect()
}

/// An error within a stream that began with a 200.
pub(super) fn error_event(call: &Call, format: Format) -> String {
    let message = "The server had an error while processing your request";
    match format {
        Format::Anthropic => event(&json!({"type": "error",
            "error": {"type": "overloaded_error", "message": "Overloaded"}})),
        _ if call.api == Api::Responses => {
            event(&json!({"type": "error", "code": "server_error", "message": message, "param": null}))
        }
        Format::OpenAi | Format::Google => {
            data(&json!({"error": {"type": "server_error", "message": message, "code": null}}))
        }
    }
}

/// The body of a 429. Of hidden limits it names the exceeded one, but no amount and no time.
pub(super) fn refusal(call: &Call, format: Format, exceeded: &Exceeded, is_hidden: bool) -> String {
    let Exceeded { counted, limit, used, requested, period, retry_after } = exceeded;
    let wait = retry_after.filter(|_| !is_hidden).map(|wait| wait.as_secs_f64());
    let (of, short, kind) = match counted {
        Counted::Requests => ("requests", "RP", "requests"),
        Counted::Tokens => ("tokens", "TP", "tokens"),
        Counted::Input => ("input tokens", "ITP", "tokens"),
        Counted::Output => ("output tokens", "OTP", "tokens"),
    };
    let is_day = period.as_secs() >= 86_400;
    let model = &call.model;
    let message = match format {
        Format::OpenAi => {
            let what = if retry_after.is_some() { "Rate limit reached" } else { "Request too large" };
            let (per, unit) = if is_day { ("day", "D") } else { ("min", "M") };
            let amounts = match wait {
                _ if is_hidden => String::new(),
                Some(wait) => format!(
                    ": Limit {limit}, Used {used}, Requested {requested}. Please try again in {wait:.3}s"
                ),
                None => format!(": Limit {limit}, Requested {requested}"),
            };
            format!("{what} for {model} in organization org-mock on {of} per {per} ({short}{unit}){amounts}.")
        }
        Format::Anthropic => {
            let amount = if is_hidden { String::new() } else { format!("{} ", with_commas(*limit)) };
            let per = if is_day { "day" } else { "minute" };
            format!(
                "This request would exceed your organization's rate limit of {amount}{of} per {per} \
                 (org: org-mock, model: {model})."
            )
        }
        Format::Google => {
            let amount = if is_hidden { String::new() } else { format!("{limit} ") };
            let per = if is_day { "day" } else { "minute" };
            format!("You exceeded your current quota of {amount}{of} per {per}.")
        }
    };
    let kind = if format == Format::Anthropic { "rate_limit_error" } else { kind };
    let code = Some("rate_limit_exceeded");
    let body =
        error_body(format, ErrorText { status: 429, kind, code, message: &message, retry_after: wait });
    match format {
        Format::Google if is_day => {
            let failure = json!({"@type": "type.googleapis.com/google.rpc.QuotaFailure",
                "violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel"}]});
            let comma = if wait.is_some() { "," } else { "" };
            body.replacen("\"details\":[", &format!("\"details\":[{failure}{comma}"), 1)
        }
        _ => body,
    }
}

/// A number with a comma after each thousand.
fn with_commas(number: u64) -> String {
    if number < 1_000 {
        return number.to_string();
    }
    format!("{},{:03}", with_commas(number / 1_000), number % 1_000)
}

/// The counts so far, as JSON.
pub(super) fn totals(totals: &super::Totals) -> String {
    let super::Totals { calls, completed, refused, failed, input, output } = *totals;
    json!({"calls": calls, "completed": completed, "refused": refused, "failed": failed,
        "input_tokens": input, "output_tokens": output})
    .to_string()
}

/// The list of models.
pub(super) fn models() -> String {
    json!({"object": "list", "data": [{"id": "mock", "object": "model", "created": 0, "owned_by": "mock"}]})
        .to_string()
}
