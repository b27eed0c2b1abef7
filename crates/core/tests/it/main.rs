//! The integration tests of core, as one program: properties, golden vectors, and text from outside.

mod gates_properties;
mod limit_properties;
mod outside_text;
mod provider_headers;
mod vectors;
