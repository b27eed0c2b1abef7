//! Maps errors of Redis to [`StoreError`] by what the caller can do about them.
//!
//! Unavailable is what a retry may not meet again: no connection, a timeout, a server that starts, fails over
//! or is full. A wrong password, an untrusted certificate and foreign data are permanent.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ErrorKind, RedisError, Value};

use crate::error::StoreError;

/// The server and the timeout that an error reports.
#[derive(Debug, Clone)]
pub(super) struct ErrorContext {
    pub(super) place: String,
    pub(super) timeout: Duration,
}

impl ErrorContext {
    /// Converts the error of a call.
    pub(super) fn store_error(&self, error: RedisError) -> StoreError {
        let what = format!("`{}`: {error}", self.place);
        if error.is_timeout() {
            return self.timed_out();
        }
        match kind(&error) {
            Kind::Unavailable => StoreError::Unavailable { what, source: Some(Box::new(error)) },
            Kind::Denied => StoreError::Denied { what },
            Kind::Corrupt => StoreError::Corrupt { what },
            Kind::Invalid => StoreError::Invalid { what },
        }
    }

    /// The error of a call that got no reply in time.
    pub(super) fn timed_out(&self) -> StoreError {
        StoreError::TimedOut { millis: u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX) }
    }

    /// An error that the script caught for one step of a batch.
    pub(super) fn script_error(&self, line: &str) -> StoreError {
        let line: String =
            line.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
        let parsed = ::redis::parse_redis_value(format!("-{}\r\n", line.trim_start_matches('-')).as_bytes());
        match parsed.and_then(Value::extract_error) {
            Err(error) => self.store_error(error),
            Ok(_) => StoreError::Corrupt { what: format!("`{}`: {line}", self.place) },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unavailable,
    Denied,
    Corrupt,
    Invalid,
}

fn kind(error: &RedisError) -> Kind {
    match error.kind() {
        ErrorKind::AuthenticationFailed => Kind::Denied,
        ErrorKind::Io if is_untrusted(error) => Kind::Denied,
        ErrorKind::Io
        | ErrorKind::ClusterConnectionNotFound
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel => Kind::Unavailable,
        ErrorKind::Server(_) | ErrorKind::Extension => code_kind(error),
        // A truncated reply is reported as a parse error.
        ErrorKind::Parse if error.to_string().contains("end of input") => Kind::Unavailable,
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Kind::Corrupt,
        _ => Kind::Invalid,
    }
}

/// The kind of an error that the server replied with.
fn code_kind(error: &RedisError) -> Kind {
    match error.code().unwrap_or_default() {
        "NOAUTH" | "WRONGPASS" | "DENIED" | "NOPERM" => Kind::Denied,
        "WRONGTYPE" => Kind::Corrupt,
        "LOADING" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "TRYAGAIN" | "MOVED" | "ASK" | "NOSCRIPT"
        | "OOM" | "BUSY" | "NOREPLICAS" | "MISCONF" | "UNBLOCKED" | "INPROG" | "STALE" | "FAILOVER" => {
            Kind::Unavailable
        }
        "ERR" => {
            let detail = error.to_string();
            if detail.contains("max number of clients") {
                Kind::Unavailable
            } else if detail.contains("user_script") {
                // Our scripts fail when they unpack data that is not in our format.
                Kind::Corrupt
            } else {
                Kind::Invalid
            }
        }
        _ => Kind::Invalid,
    }
}

/// Whether TLS did not trust the server, which it reports as invalid data.
fn is_untrusted(error: &RedisError) -> bool {
    type Shared = Arc<dyn Error + Send + Sync>;
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(error) = source {
        // The client wraps the cause in an `Arc`, which hides its type.
        let io = match error.downcast_ref::<Shared>() {
            Some(shared) => shared.downcast_ref::<io::Error>(),
            None => error.downcast_ref::<io::Error>(),
        };
        if let Some(io) = io {
            return io.kind() == io::ErrorKind::InvalidData;
        }
        source = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_error(line: &str) -> RedisError {
        let value =
            ::redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("a line of the protocol");
        value.extract_error().expect_err("an error")
    }

    #[test]
    fn only_transient_errors_are_unavailable() {
        let table = [
            ("LOADING Redis is loading the dataset in memory", Kind::Unavailable),
            ("READONLY You can't write against a read only replica.", Kind::Unavailable),
            ("CLUSTERDOWN The cluster is down", Kind::Unavailable),
            ("MASTERDOWN Link with MASTER is down", Kind::Unavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Kind::Unavailable),
            ("OOM command not allowed when used memory > 'maxmemory'.", Kind::Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", Kind::Unavailable),
            ("ERR max number of clients reached", Kind::Unavailable),
            ("NOAUTH Authentication required.", Kind::Denied),
            ("WRONGPASS invalid username-password pair or user is disabled.", Kind::Denied),
            ("NOPERM this user has no permissions to run the 'evalsha' command", Kind::Denied),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Kind::Corrupt),
            ("ERR user_script:31: data string too short script: f00", Kind::Corrupt),
            ("CROSSSLOT Keys in request don't hash to the same slot", Kind::Invalid),
            ("ERR unknown command 'EVALSHA'", Kind::Invalid),
        ];
        for (line, expected) in table {
            assert_eq!(kind(&server_error(line)), expected, "{line}");
        }
        let io = |kind: io::ErrorKind| RedisError::from(io::Error::new(kind, "x"));
        for transient in
            [io::ErrorKind::ConnectionRefused, io::ErrorKind::UnexpectedEof, io::ErrorKind::BrokenPipe]
        {
            assert_eq!(kind(&io(transient)), Kind::Unavailable, "{transient}");
        }
        assert_eq!(kind(&io(io::ErrorKind::InvalidData)), Kind::Denied);
        let context = ErrorContext { place: "redis://x".to_owned(), timeout: Duration::from_secs(2) };
        assert!(matches!(
            context.store_error(io(io::ErrorKind::TimedOut)),
            StoreError::TimedOut { millis: 2_000 }
        ));
        assert!(context.store_error(server_error("LOADING x")).is_transient());
    }
}
