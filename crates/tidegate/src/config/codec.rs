//! Flattens TOML and JSON texts into lists of keys and values, and formats values as text.

use serde_json::Value as Json;
use tidegate_core::duration::Exact;
use tidegate_core::plan::FieldValue;
use toml::de::{DeTable, DeValue, Error as TomlError};

use super::error::{ConfigProblem, Fault, Origin};
use super::scalar::Scalar;

/// Dotted keys and their values, in document order.
pub(super) type Pairs = Vec<(String, Scalar)>;

/// No key is nested deeper than this.
const DEPTH_MAX: usize = 8;

/// The keys and values of a TOML text.
///
/// # Errors
/// The text is not TOML.
pub(super) fn from_toml(text: &str) -> Result<Pairs, ConfigProblem> {
    let mut pairs = Pairs::new();
    flatten_toml("", &toml_table(text)?, &mut pairs);
    Ok(pairs)
}

/// Parses a TOML text into a table.
///
/// # Errors
/// The text is not TOML.
pub(super) fn toml_table(text: &str) -> Result<DeTable<'_>, ConfigProblem> {
    // The parser bounds braces and dots separately; together they nest deeply enough to exhaust a small
    // stack.
    if let Some(start) = too_deep(text) {
        let message = format!("more than {DEPTH_MAX} nested tables {}", place(text, start));
        return Err(unreadable(Origin::Toml, message));
    }
    let table = DeTable::parse(text).map_err(|error| unreadable(Origin::Toml, sentence(text, &error)))?;
    Ok(table.into_inner())
}

/// Converts a single TOML value.
pub(super) fn toml_scalar(value: &DeValue<'_>) -> Scalar {
    match value {
        DeValue::String(text) => Scalar::Text(text.clone().into_owned()),
        DeValue::Integer(integer) => i128::from_str_radix(integer.as_str(), integer.radix())
            .map_or_else(|_| Scalar::Huge(integer.to_string()), Scalar::Integer),
        DeValue::Float(float) => float
            .as_str()
            .parse()
            .map_or_else(|_| Scalar::Huge(float.to_string()), |number| huge_or(number, float.as_str())),
        DeValue::Boolean(bool) => Scalar::Bool(*bool),
        DeValue::Datetime(_) => Scalar::Other("a date or time of day"),
        DeValue::Array(array) => {
            let text = |value: &DeValue<'_>| value.as_str().map(str::to_owned);
            let texts = array.iter().map(|value| text(value.get_ref())).collect();
            list_or(texts)
        }
        DeValue::Table(_) => Scalar::Other("a table"),
    }
}

/// The keys and values of a JSON text.
///
/// # Errors
/// The text is not JSON, or not an object.
pub(super) fn from_json(text: &str) -> Result<Pairs, ConfigProblem> {
    let json: Json =
        serde_json::from_str(text).map_err(|error| unreadable(Origin::Json, error.to_string()))?;
    let Json::Object(_) = json else {
        return Err(unreadable(Origin::Json, "it is not an object".to_owned()));
    };
    let mut pairs = Pairs::new();
    flatten_json("", &json, &mut pairs);
    Ok(pairs)
}

/// Formats a value for a map or a variable.
pub(super) fn to_text(value: &FieldValue) -> String {
    match value {
        FieldValue::Count(count) => count.to_string(),
        FieldValue::Span(span) => Exact(*span).to_string(),
        FieldValue::Fraction(number) | FieldValue::Number(number) => format!("{number:?}"),
        FieldValue::Word(word) => (*word).to_owned(),
        FieldValue::Flag(flag) => flag.to_string(),
        FieldValue::Text(text) => text.clone(),
    }
}

/// Formats a value as a TOML literal. JSON uses the same notation for these.
pub(super) fn to_literal(value: &FieldValue) -> String {
    match value {
        FieldValue::Count(_) | FieldValue::Fraction(_) | FieldValue::Number(_) | FieldValue::Flag(_) => {
            to_text(value)
        }
        // Nothing needs escaping: these consist of digits, units, names of limits, and words of the schema.
        FieldValue::Span(_) | FieldValue::Word(_) | FieldValue::Text(_) => format!("\"{}\"", to_text(value)),
    }
}

fn flatten_toml(path: &str, table: &DeTable<'_>, pairs: &mut Pairs) {
    if table.is_empty() && !path.is_empty() {
        pairs.push((path.to_owned(), Scalar::Empty));
    }
    for (key, value) in table {
        let path = join(path, key.get_ref());
        match value.get_ref() {
            DeValue::Table(table) if !is_too_deep(&path) => flatten_toml(&path, table, pairs),
            value => pairs.push((path, toml_scalar(value))),
        }
    }
}

fn flatten_json(path: &str, json: &Json, pairs: &mut Pairs) {
    let scalar = match json {
        Json::Object(object) if object.is_empty() && path.is_empty() => return,
        Json::Object(object) if object.is_empty() => Scalar::Empty,
        Json::Object(_) if is_too_deep(path) => Scalar::Other("an object"),
        Json::Object(object) => {
            object.iter().for_each(|(key, json)| flatten_json(&join(path, key), json, pairs));
            return;
        }
        Json::Null => Scalar::Other("null"),
        Json::Array(array) => list_or(array.iter().map(|json| json.as_str().map(str::to_owned)).collect()),
        Json::Bool(bool) => Scalar::Bool(*bool),
        Json::String(text) => Scalar::Text(text.clone()),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), ..) => Scalar::Integer(integer.into()),
            (_, Some(integer), _) => Scalar::Integer(integer.into()),
            (.., Some(float)) => huge_or(float, &number.to_string()),
            _ => Scalar::Huge(number.to_string()),
        },
    };
    pairs.push((path.to_owned(), scalar));
}

/// The texts of an array, if it has nothing else.
fn list_or(texts: Option<Vec<String>>) -> Scalar {
    texts.map_or(Scalar::Other("an array"), Scalar::List)
}

/// The number, unless parsing made it infinite.
fn huge_or(number: f64, text: &str) -> Scalar {
    if number.is_infinite() && !text.contains("inf") {
        Scalar::Huge(text.to_owned())
    } else {
        Scalar::Float(number)
    }
}

fn is_too_deep(path: &str) -> bool {
    path.matches('.').count() >= DEPTH_MAX
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn unreadable(origin: Origin, message: String) -> ConfigProblem {
    ConfigProblem::new(origin, "", Fault::Unreadable { message })
}

/// The position at which more braces are open than any config needs, even if they are in a comment.
fn too_deep(text: &str) -> Option<usize> {
    let mut open = 0_usize;
    text.bytes().position(|letter| {
        match letter {
            b'{' => open += 1,
            b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        open > DEPTH_MAX
    })
}

/// The parser's message with the position, on one line.
fn sentence(text: &str, error: &TomlError) -> String {
    let message = error.message();
    error.span().map_or_else(|| message.to_owned(), |span| format!("{message} {}", place(text, span.start)))
}

fn place(text: &str, start: usize) -> String {
    let before = text.get(..start).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
    format!("at line {line} column {column}")
}
