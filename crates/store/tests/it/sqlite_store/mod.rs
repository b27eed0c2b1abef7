//! The store in a file, in the hands of one process: what becomes of it when the file, the clock, or its callers misbehave.

mod bounds;
mod clock;
mod durable;
mod evicts;
mod files;
mod forgets;
mod gone;
mod lifecycle;
mod like_memory;
mod panics;
mod retention;
mod tampered;
mod together;
mod tokens;
