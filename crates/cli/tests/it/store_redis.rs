//! `tidegate store` on Redis.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::kit::Fixture;
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::lifecycle::{Lifecycle, Older};

/// The variable with the address of the engine.
const REDIS: &str = "TIDEGATE_TEST_REDIS";

/// Sends a command to the server, as another program could.
fn send(url: &str, command: &str) {
    let server = url.trim_start_matches("redis://");
    let mut stream = TcpStream::connect(server).expect("the server runs");
    stream.write_all(format!("{command}\r\n").as_bytes()).expect("it reads");
    let mut answer = [0];
    stream.read_exact(&mut answer).expect("it answers");
    assert_eq!(answer, *b":", "{command}");
}

#[test]
fn redis_namespace_is_created_checked_and_upgraded() {
    skip_without!(REDIS);
    let (server, name) = (address(REDIS), unique("life"));
    let url = format!("{server}?namespace={name}&timeout_ms=30000");
    let lifecycle = Lifecycle { fixture: Fixture::new(), url, wanted: 4, older: Older::Refused };
    lifecycle.walk(|| {
        send(&server, &format!("HSET tidegate:{{{name}}}:meta schema 1"));
        send(&server, &format!("SREM tidegate:namespaces {name}"));
    });
    let (_, checked) = lifecycle.json("store check");
    let settings =
        checked["settings"].as_array().unwrap().iter().map(|setting| setting["name"].as_str().unwrap());
    assert_eq!(
        settings.collect::<Vec<_>>(),
        ["maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save"]
    );
    assert!(checked["server"].as_str().unwrap().starts_with("Redis "));
    let clock = |field: &str| checked["clock"][field].as_f64().unwrap();
    assert!(clock("ahead").abs() <= 1.0 + clock("within"), "it is the same machine");

    send(&server, &format!("HSET tidegate:{{{name}}}:meta schema 99"));
    for line in ["store init", "store check", "store upgrade", "balance acme gpt"] {
        let run = lifecycle.run(line);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line}: {run:?}");
        assert!(
            run.stderr.ends_with(" has schema version 99, newer than 4: use a newer tidegate\n"),
            "{run:?}"
        );
    }
}
