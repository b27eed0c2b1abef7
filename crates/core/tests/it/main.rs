//! Integration tests of core: properties, golden vectors, and fuzzing of untrusted text.

mod gates_properties;
mod limit_properties;
mod named_properties;
mod outside_text;
mod provider_headers;
mod vectors;
