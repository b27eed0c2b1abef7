//! Peers, reimplemented from their published rules, and an oracle that knows the hidden limit.
//!
//! They see what a client sees: successes, rejections, errors and `Retry-After`. None of them reads quota
//! headers.

mod aws;
mod backoff;
mod gentlify;
mod netflix;
mod oracle;

pub(crate) use aws::AwsAdaptive;
pub(crate) use backoff::Backoff;
pub(crate) use gentlify::Gentlify;
pub(crate) use netflix::Netflix;
pub(crate) use oracle::Oracle;
