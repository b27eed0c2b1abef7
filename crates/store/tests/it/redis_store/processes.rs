//! Several processes on one server.

use std::process::Stdio;
use std::sync::Arc;

use tidegate_store::{Buckets as _, Drawn, Lookup};

use crate::kit::child::test_name;
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::redis::{REDIS, draw, levels, patient, slow, subject};

/// Names the namespace for a process that is started to draw.
const NAMESPACE: &str = "TIDEGATE_TEST_NAMESPACE";

/// How many of sixty callers at once get one of the fifty there are.
async fn sixty_at_once(namespace: &str) -> usize {
    let store =
        Arc::new(patient(&address(REDIS)).namespace(namespace).open().await.expect("the server is there"));
    let levels = levels(1, &[("acme", &[slow("rpm", 50)])]);
    let callers: Vec<_> = (0..60)
        .map(|_| {
            let (store, asked) = (Arc::clone(&store), draw(&levels, &[("rpm", 1)]));
            tokio::spawn(async move { matches!(store.draw(&asked).await, Ok(Drawn::Granted(_))) })
        })
        .collect();
    let mut granted = 0;
    for caller in callers {
        granted += usize::from(caller.await.expect("no caller panics"));
    }
    granted
}

/// What the other process runs; by itself it has nothing to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_draws() {
    if let Ok(namespace) = std::env::var(NAMESPACE) {
        std::fs::write(
            std::env::var("TIDEGATE_TEST_ANSWER").unwrap(),
            sixty_at_once(&namespace).await.to_string(),
        )
        .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_and_twenty_of_two_processes_take_exactly_the_fifty_there_are() {
    skip_without!(REDIS);
    let (namespace, folder) = (unique("processes"), tempfile::tempdir().unwrap());
    let children: Vec<_> = (0..2)
        .map(|number| {
            let answer = folder.path().join(number.to_string());
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test_name!(a_process_that_draws)])
                .env(NAMESPACE, &namespace)
                .env("TIDEGATE_TEST_ANSWER", &answer)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            (child, answer)
        })
        .collect();
    let mut granted = 0;
    for (mut child, answer) in children {
        assert!(tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap().success());
        granted += std::fs::read_to_string(answer).unwrap().parse::<u64>().unwrap();
    }
    assert_eq!(granted, 50);
    let store = patient(&address(REDIS)).namespace(&namespace).open().await.unwrap();
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 50);
}
