//! The Jinja environment chat templates expect: what the `transformers` library adds to plain Jinja.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Value as Json;
use time::OffsetDateTime;
use time::format_description::parse_strftime_owned;

/// Enough for a conversation of hundreds of thousands of words; a template that loops for ever runs out of it.
const FUEL: u64 = 50_000_000;

/// An environment with the one template `chat`.
pub(super) fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", to_json);
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    env.add_template_owned("chat", without_generation_tags(source))?;
    Ok(env)
}

/// The date function of a rendering, for the moment that the caller chose.
pub(super) fn strftime(now: OffsetDateTime) -> Value {
    Value::from_function(move |format: &str| -> Result<String, Error> {
        let invalid = |e: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}"));
        let description = parse_strftime_owned(format).map_err(|e| invalid(e.to_string()))?;
        now.format(&description).map_err(|e| invalid(e.to_string()))
    })
}

/// As in Python: anything with items, which `none` hasn't; templates ask this of `tools`.
fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::String)
}

/// What the template itself says is wrong with the conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `{% generation %}` marks the assistant's text for training; for inference it means nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}").map(|end| end + 2) else { break };
        let tag = &rest[start..start + len];
        let word = tag[2..len - 2].trim_matches(['-', '+']).trim();
        let replacement = match word {
            // A comment keeps the white-space control of the tag.
            "generation" | "endgeneration" => tag.replacen("{%", "{#", 1).replace("%}", "#}"),
            _ => tag.to_owned(),
        };
        out.push_str(&rest[..start]);
        out.push_str(&replacement);
        rest = &rest[start + len..];
    }
    out + rest
}

/// `tojson(indent, ensure_ascii, separators, sort_keys)` with Python's defaults: spaces after `,` and `:`, no escaping of
/// HTML or of non-ASCII characters.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let mut style = JsonStyle {
        indent: indent.map(|n| n.min(16)),
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item_separator: if indent.is_some() { ",".into() } else { ", ".into() },
        key_separator: ": ".into(),
    };
    kwargs.assert_all_used()?;
    if let Some([item, key]) = separators.as_deref() {
        (style.item_separator, style.key_separator) = (item.clone(), key.clone());
    }
    let json =
        serde_json::to_value(value).map_err(|e| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(out)
}

/// How Python's `json.dumps` writes.
struct JsonStyle {
    indent: Option<usize>,
    ascii: bool,
    sort_keys: bool,
    item_separator: String,
    key_separator: String,
}

impl JsonStyle {
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::String(text) => self.write_string(text, out),
            Json::Array(items) => self.write_items(['[', ']'], items, depth, out, |item, out| {
                self.write(item, depth + 1, out);
            }),
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.write_items(['{', '}'], &entries, depth, out, |(key, item), out| {
                    self.write_string(key, out);
                    out.push_str(&self.key_separator);
                    self.write(item, depth + 1, out);
                });
            }
            scalar => out.push_str(&scalar.to_string()),
        }
    }

    fn write_items<T>(
        &self,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        out: &mut String,
        write: impl Fn(&T, &mut String),
    ) {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(depth + 1, out);
            write(item, out);
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        let quoted = Json::from(text).to_string();
        if !self.ascii {
            out.push_str(&quoted);
            return;
        }
        let mut units = [0; 2];
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                out.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::{context, value::Serde};
    use serde_json::json;

    fn render(source: &str, x: Json) -> Result<String, Error> {
        let env = environment(source)?;
        let now = time::macros::datetime!(2024-07-26 09:05:00 UTC);
        env.get_template("chat")?.render(context! { x => Value::from(Serde(x)), strftime_now => strftime(now) })
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let x = json!({"b": [1, 2.5, null], "a": {"t": "<é>\n'"}, "e": [], "o": {}});
        assert_eq!(
            render("{{ x | tojson }}", x.clone()).unwrap(),
            r#"{"b": [1, 2.5, null], "a": {"t": "<é>\n'"}, "e": [], "o": {}}"#
        );
        assert_eq!(
            render("{{ x.a | tojson(indent=2, ensure_ascii=true) }}", x.clone()).unwrap(),
            "{\n  \"t\": \"<\\u00e9>\\n'\"\n}"
        );
        assert_eq!(
            render("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x).unwrap(),
            r#"{"a":{"t":"<é>\n'"},"b":[1,2.5,null],"e":[],"o":{}}"#
        );
    }

    #[test]
    fn dates_methods_and_loop_controls_work() {
        let source = "{{ strftime_now('%d %b %Y') }}{% for i in x %}{% if loop.index > 2 %}{% break %}{% endif %}\
                      {% generation %}{{ i.strip() }}{% endgeneration %}{% endfor %}";
        assert_eq!(render(source, json!([" a ", "b", "c"])).unwrap(), "26 Jul 2024ab");
        assert!(render("{{ strftime_now('%Q') }}", json!(1)).is_err());
    }

    #[test]
    fn nothing_is_not_iterable() {
        let source = "{{ x is iterable }} {{ y is iterable }} {{ 'ab' is iterable }} {{ [] is iterable }}";
        assert_eq!(render(source, Json::Null).unwrap(), "False False True True");
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let source = "{% for i in range(100000) %}{% for j in range(100000) %}{{ j }}{% endfor %}{% endfor %}";
        assert_eq!(render(source, json!(1)).unwrap_err().kind(), ErrorKind::OutOfFuel);
    }

    #[test]
    fn raise_exception_carries_the_templates_message() {
        let error = render("{{ raise_exception('roles must alternate') }}", json!(1)).unwrap_err();
        assert_eq!(error.detail(), Some("roles must alternate"));
    }
}
