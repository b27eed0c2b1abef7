//! What the engine says went wrong, as what a caller can do about it.
//!
//! Away is what a later try may find gone: no connection, a timeout, a server that starts, fails over or is full. A
//! password that is wrong, a certificate that is not believed and data that is not ours are answers, and stay so.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::error::StoreError;

/// Says which server a trouble is about, and how long an answer is waited for.
#[derive(Debug, Clone)]
pub(super) struct Whose {
    pub(super) place: String,
    pub(super) timeout: Duration,
}

impl Whose {
    /// The error of a call.
    pub(super) fn trouble(&self, error: RedisError) -> StoreError {
        let what = format!("`{}`: {error}", self.place);
        if error.is_timeout() {
            return self.timed_out();
        }
        match kind(&error) {
            Kind::Away => StoreError::Unavailable { what, source: Some(Box::new(error)) },
            Kind::Denied => StoreError::Denied { what },
            Kind::Corrupt => StoreError::Corrupt { what },
            Kind::Invalid => StoreError::Invalid { what },
        }
    }

    /// No answer came in time.
    pub(super) fn timed_out(&self) -> StoreError {
        StoreError::TimedOut { millis: u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX) }
    }

    /// What a script says that the server told it about one of many steps.
    pub(super) fn told(&self, line: &str) -> StoreError {
        let line: String =
            line.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
        let told = ::redis::parse_redis_value(format!("-{}\r\n", line.trim_start_matches('-')).as_bytes());
        match told.and_then(Value::extract_error) {
            Err(error) => self.trouble(error),
            Ok(other) => self.unexpected(&other),
        }
    }

    /// A reply that no script of ours gives.
    pub(super) fn unexpected(&self, reply: &Value) -> StoreError {
        let mut shown: String = format!("{reply:?}").chars().take(200).collect();
        shown.insert_str(0, &format!("`{}` answers ", self.place));
        StoreError::Corrupt { what: shown }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Away,
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
        | ErrorKind::NoValidReplicasFoundBySentinel => Kind::Away,
        ErrorKind::Server(kind) => of_server(kind, error),
        ErrorKind::Extension => of_code(error.code().unwrap_or_default()),
        // An answer that was cut off is told as one that cannot be read.
        ErrorKind::Parse if error.to_string().contains("end of input") => Kind::Away,
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Kind::Corrupt,
        _ => Kind::Invalid,
    }
}

fn of_server(kind: ServerErrorKind, error: &RedisError) -> Kind {
    match kind {
        ServerErrorKind::BusyLoading
        | ServerErrorKind::ClusterDown
        | ServerErrorKind::MasterDown
        | ServerErrorKind::ReadOnly
        | ServerErrorKind::TryAgain
        | ServerErrorKind::Moved
        | ServerErrorKind::Ask
        | ServerErrorKind::NoScript => Kind::Away,
        ServerErrorKind::NoPerm => Kind::Denied,
        ServerErrorKind::ResponseError => {
            let detail = error.to_string();
            if detail.contains("max number of clients") {
                Kind::Away
            } else if detail.contains("user_script") {
                // Our scripts fail where they unpack what is not as they pack it.
                Kind::Corrupt
            } else {
                Kind::Invalid
            }
        }
        _ => Kind::Invalid,
    }
}

fn of_code(code: &str) -> Kind {
    match code {
        "NOAUTH" | "WRONGPASS" | "DENIED" => Kind::Denied,
        "WRONGTYPE" => Kind::Corrupt,
        "OOM" | "BUSY" | "NOREPLICAS" | "MISCONF" | "UNBLOCKED" | "INPROG" | "STALE" | "FAILOVER" => {
            Kind::Away
        }
        _ => Kind::Invalid,
    }
}

/// Whether a connection failed because the other side is not whom it was to be: TLS says so with data that is not valid.
fn is_untrusted(error: &RedisError) -> bool {
    type Shared = Arc<dyn Error + Send + Sync>;
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(error) = source {
        // The client shares what it came from, which then stands for itself.
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

    fn said(line: &str) -> RedisError {
        let value =
            ::redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("a line of the protocol");
        value.extract_error().expect_err("an error")
    }

    #[test]
    fn away_is_what_may_pass_and_everything_else_is_an_answer() {
        let table = [
            ("LOADING Redis is loading the dataset in memory", Kind::Away),
            ("READONLY You can't write against a read only replica.", Kind::Away),
            ("CLUSTERDOWN The cluster is down", Kind::Away),
            ("MASTERDOWN Link with MASTER is down", Kind::Away),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Kind::Away),
            ("OOM command not allowed when used memory > 'maxmemory'.", Kind::Away),
            ("NOREPLICAS Not enough good replicas to write.", Kind::Away),
            ("ERR max number of clients reached", Kind::Away),
            ("NOAUTH Authentication required.", Kind::Denied),
            ("WRONGPASS invalid username-password pair or user is disabled.", Kind::Denied),
            ("NOPERM this user has no permissions to run the 'evalsha' command", Kind::Denied),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Kind::Corrupt),
            ("ERR user_script:31: data string too short script: f00", Kind::Corrupt),
            ("CROSSSLOT Keys in request don't hash to the same slot", Kind::Invalid),
            ("ERR unknown command 'EVALSHA'", Kind::Invalid),
        ];
        for (line, expected) in table {
            assert_eq!(kind(&said(line)), expected, "{line}");
        }
        let io = |kind: io::ErrorKind| RedisError::from(io::Error::new(kind, "x"));
        for away in
            [io::ErrorKind::ConnectionRefused, io::ErrorKind::UnexpectedEof, io::ErrorKind::BrokenPipe]
        {
            assert_eq!(kind(&io(away)), Kind::Away, "{away}");
        }
        assert_eq!(kind(&io(io::ErrorKind::InvalidData)), Kind::Denied);
        let whose = Whose { place: "redis://x".to_owned(), timeout: Duration::from_secs(2) };
        assert!(matches!(whose.trouble(io(io::ErrorKind::TimedOut)), StoreError::TimedOut { millis: 2_000 }));
        assert!(whose.trouble(said("LOADING x")).is_transient());
    }
}
