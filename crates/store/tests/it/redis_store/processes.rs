//! Several processes on one server.

use std::process::Stdio;
use std::sync::Arc;

use tidegate_store::{Buckets as _, DrawResult, Lookup};

use crate::kit::child::test_name;
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::redis::{REDIS, draw, levels, options_at, slow, subject};

/// The namespace, for a child process.
const NAMESPACE: &str = "TIDEGATE_TEST_NAMESPACE";

/// The number of grants for sixty concurrent callers of a limit of fifty.
async fn sixty_at_once(namespace: &str) -> usize {
    let store =
        Arc::new(options_at(&address(REDIS)).namespace(namespace).open().await.expect("the server responds"));
    let levels = levels(1, &[("acme", &[slow("rpm", 50)])]);
    let callers: Vec<_> = (0..60)
        .map(|_| {
            let (store, step) = (Arc::clone(&store), draw(&levels, &[("rpm", 1)]));
            tokio::spawn(async move { matches!(store.draw(&step).await, Ok(DrawResult::Granted(_))) })
        })
        .collect();
    let mut granted = 0;
    for caller in callers {
        granted += usize::from(caller.await.expect("no caller panics"));
    }
    granted
}

/// The body of the child process; does nothing in the parent.
#[tokio::test(flavor = "multi_thread")]
async fn child_process_draws() {
    if let Ok(namespace) = std::env::var(NAMESPACE) {
        std::fs::write(
            std::env::var("TIDEGATE_TEST_ANSWER").unwrap(),
            sixty_at_once(&namespace).await.to_string(),
        )
        .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_take_exactly_the_limit() {
    skip_without!(REDIS);
    let (namespace, folder) = (unique("processes"), tempfile::tempdir().unwrap());
    let children: Vec<_> = (0..2)
        .map(|number| {
            let answer = folder.path().join(number.to_string());
            let child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test_name!(child_process_draws)])
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
    let store = options_at(&address(REDIS)).namespace(&namespace).open().await.unwrap();
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 50);
}
