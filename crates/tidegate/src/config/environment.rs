//! Environment variables as keys: `TIDEGATE_SLOTS_MAX` is `slots.max`.
//!
//! Variables are matched against the list of keys, so that an underscore inside a key is not ambiguous, and a
//! variable with the prefix that matches no key is reported.

use std::ffi::OsString;

use tidegate_core::excerpt::excerpt;

use super::Config;
use super::error::{ConfigProblem, Fault, Origin};
use super::scalar::Scalar;
use super::schema::{self, Field, fields};

/// Variables of the program `tidegate`, without the prefix. With its prefix they configure the program and
/// not a throttle; a test of the program checks that none is missing.
const PROGRAM: [&str; 36] = [
    "ACTOR",
    "ALIVE_EVERY",
    "BODY_MAX",
    "BODY_TIME",
    "CA",
    "CLIENT_CERT",
    "CLIENT_KEY",
    "CONFIG",
    "CONNECTIONS_MAX",
    "DRAIN_TIME",
    "ENVOY",
    "HEADERS_MAX",
    "HEAD_MAX",
    "HEAD_TIME",
    "LEASE_DEADLINE",
    "LEASE_DEADLINE_MAX",
    "LISTEN",
    "LISTENERS_MAX",
    "LOG",
    "LOG_LEVEL",
    "MANIFEST",
    "METRICS",
    "PROXY",
    "REPORT_TIME",
    "REQUESTS_MAX",
    "SERVER",
    "STORE",
    "SWEEP_EVERY",
    "TIMEOUT",
    "TLS_CERT",
    "TLS_CLIENT_CA",
    "TLS_KEY",
    "TOKEN",
    "TOKEN_FILE",
    "WITHIN_MAX",
    "WITHOUT_TLS",
];

/// A variable's key, origin and value.
pub(super) type VariableValue = (&'static Field, Origin, Scalar);

/// The values of the variables with the prefix, and their problems.
pub(super) fn read<N, V>(
    prefix: &str,
    variables: impl IntoIterator<Item = (N, V)>,
) -> (Vec<VariableValue>, Vec<ConfigProblem>)
where
    N: Into<OsString>,
    V: Into<OsString>,
{
    let mut values = Vec::new();
    let mut problems = Vec::new();
    if prefix.is_empty() {
        let message = "the prefix is empty, which would match every variable".to_owned();
        problems.push(ConfigProblem::new(Origin::Environment, "", Fault::Unreadable { message }));
        return (values, problems);
    }
    for (name, value) in variables {
        let name = name.into();
        let name = name.to_string_lossy();
        let Some(rest) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) else { continue };
        if prefix == Config::PREFIX && PROGRAM.contains(&rest) {
            continue;
        }
        let Some(field) = fields().iter().find(|field| field.variable(prefix) == name) else {
            let closest = schema::closest(&name, fields().iter().map(|field| field.variable(prefix)));
            let fault = Fault::Unknown { closest };
            problems.push(ConfigProblem::new(Origin::Environment, excerpt(&name), fault));
            continue;
        };
        let origin = Origin::Variable(name.into_owned());
        match value.into().into_string() {
            Ok(text) => values.push((field, origin, Scalar::Untyped(text))),
            Err(bytes) => {
                let value = format!("\"{}\"", excerpt(&bytes.to_string_lossy()));
                let fault = Fault::OutOfBounds { value, bound: "valid UTF-8".to_owned() };
                problems.push(ConfigProblem::new(origin, field.key(), fault));
            }
        }
    }
    (values, problems)
}
