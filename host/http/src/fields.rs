//! Fields that take several JSON types. Each is read by hand, so that an error says all that would have been right.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use utoipa::ToSchema;

/// A text or a list of texts.
#[derive(Clone, Debug, PartialEq, Eq, ToSchema)]
#[serde(untagged)]
pub(crate) enum Texts {
    /// One.
    One(String),
    /// Any number.
    Many(Vec<String>),
}

impl Texts {
    /// As a list.
    pub(crate) fn to_vec(&self) -> Vec<String> {
        match self {
            Texts::One(text) => vec![text.clone()],
            Texts::Many(texts) => texts.clone(),
        }
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts::One(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Texts, A::Error> {
                list(seq).map(Texts::Many)
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, ToSchema)]
#[serde(untagged)]
pub(crate) enum Piece {
    /// To be tokenised.
    Text(String),
    /// A token id.
    Token(i64),
}

impl<'de> Deserialize<'de> for Piece {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl Visitor<'_> for Form {
            type Value = Piece;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a token id")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Piece, E> {
                Ok(Piece::Text(text.to_owned()))
            }

            fn visit_i64<E: Error>(self, id: i64) -> Result<Piece, E> {
                Ok(Piece::Token(id))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Piece, E> {
                Ok(Piece::Token(i64::try_from(id).unwrap_or(i64::MAX)))
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// One prompt: a text, or texts and tokens mixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompt(pub(crate) Vec<Piece>);

/// One prompt or several.
///
/// A string is one prompt, and so is an array with a token id in it; any other array holds prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompts(pub(crate) Vec<Prompt>);

impl utoipa::PartialSchema for Prompts {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ArrayBuilder, OneOfBuilder};
        let pieces = || ArrayBuilder::new().items(Piece::schema()).build();
        OneOfBuilder::new()
            .item(String::schema())
            .item(pieces())
            .item(ArrayBuilder::new().items(OneOfBuilder::new().item(String::schema()).item(pieces())).build())
            .into()
    }
}

impl ToSchema for Prompts {}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, an array of token ids and strings, or an array of prompts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt(vec![Piece::Text(text.to_owned())])]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Prompts, A::Error> {
                let elements: Vec<Element> = list(seq)?;
                let is_one_prompt = elements.iter().any(|element| matches!(element, Element::Piece(Piece::Token(_))));
                if !is_one_prompt {
                    return Ok(Prompts(elements.into_iter().map(Element::into_prompt).collect()));
                }
                let pieces = elements.into_iter().map(|element| match element {
                    Element::Piece(piece) => Ok(piece),
                    Element::Pieces(_) => Err(A::Error::custom(
                        "mixes token ids with arrays; write one array of ids and strings, or an array of prompts",
                    )),
                });
                Ok(Prompts(vec![Prompt(pieces.collect::<Result<_, _>>()?)]))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Prompts, A::Error> {
                map_prompt(&mut map).map(|piece| Prompts(vec![Prompt(vec![piece])]))
            }
        }
        deserializer.deserialize_any(Form)
    }
}

enum Element {
    Piece(Piece),
    Pieces(Vec<Piece>),
}

impl Element {
    fn into_prompt(self) -> Prompt {
        Prompt(match self {
            Element::Piece(piece) => vec![piece],
            Element::Pieces(pieces) => pieces,
        })
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> Visitor<'de> for Form {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, or an array of them (this model takes text only)")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Piece(Piece::Text(text.to_owned())))
            }

            fn visit_i64<E: Error>(self, id: i64) -> Result<Element, E> {
                Ok(Element::Piece(Piece::Token(id)))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
                Ok(Element::Piece(Piece::Token(i64::try_from(id).unwrap_or(i64::MAX))))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Element, A::Error> {
                list(seq).map(Element::Pieces)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Element, A::Error> {
                map_prompt(&mut map).map(Element::Piece)
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// `{"prompt_string", "multimodal_data"}`: the text, as long as no data comes with it.
fn map_prompt<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Piece, A::Error> {
    let mut text = None;
    while let Some(key) = map.next_key::<String>()? {
        match key.as_str() {
            "prompt_string" => text = Some(map.next_value::<String>()?),
            "multimodal_data" => {
                let data: Vec<IgnoredAny> = map.next_value()?;
                if !data.is_empty() {
                    return Err(A::Error::custom("carries multimodal_data, but this model takes text only"));
                }
            }
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
    }
    text.map(Piece::Text).ok_or_else(|| A::Error::custom("has no prompt_string"))
}

fn list<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(mut seq: A) -> Result<Vec<T>, A::Error> {
    // The length hint is the sender's word; no memory is reserved on it.
    let mut items = Vec::new();
    while let Some(item) = seq.next_element()? {
        items.push(item);
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::fields;

    #[derive(serde::Deserialize, Debug)]
    struct Body {
        prompt: Prompts,
    }

    fn lengths(prompt: serde_json::Value) -> Vec<usize> {
        let body: Body = fields(&json!({ "prompt": prompt })).expect("valid");
        body.prompt.0.iter().map(|prompt| prompt.0.len()).collect()
    }

    #[test]
    fn an_array_with_a_token_id_is_one_prompt_and_any_other_array_holds_prompts() {
        assert_eq!(lengths(json!("a")), [1]);
        assert_eq!(lengths(json!(["a", "b"])), [1, 1]);
        assert_eq!(lengths(json!([1, 2, 3])), [3]);
        assert_eq!(lengths(json!(["a", 2, "b"])), [3]);
        assert_eq!(lengths(json!([[1, 2], "b", ["c", 4, 5]])), [2, 1, 3]);
        assert_eq!(lengths(json!([{"prompt_string": "a"}])), [1]);
        assert_eq!(lengths(json!({"prompt_string": "a", "multimodal_data": []})), [1]);
    }

    #[test]
    fn a_wrong_element_is_named_by_its_place() {
        for (prompt, path) in
            [(json!(["a", true]), "prompt[1]"), (json!([["a", 1.5]]), "prompt[0][1]"), (json!(3), "prompt")]
        {
            let error = fields::<Body>(&json!({ "prompt": prompt })).expect_err("wrong");
            assert_eq!(error.param(), Some(path), "{}", error.message());
        }
        let error =
            fields::<Body>(&json!({"prompt": [{"prompt_string": "a", "multimodal_data": ["x"]}]})).expect_err("wrong");
        assert!(error.message().contains("text only"), "{}", error.message());
    }
}
