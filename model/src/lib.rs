//! The queue and the registry of keys under a model checker, which runs the real code under many interleavings.
//!
//! Built with `--cfg tidegate_model`, where the locks of `tidegate` are shuttle's; empty without it. `cargo xtask test` runs it.
#![cfg(all(test, tidegate_model))]

mod keyed;
mod kit;
mod throttle;
