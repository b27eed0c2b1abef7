//! Tokens that work reports while it runs.

use tidegate::{Attempt, Backoff, Budget, Cost, Outcome, Retry, RunError, Throttle};
use tokio::sync::oneshot;

use crate::kit::{millis, secs};

#[tokio::test(start_paused = true)]
async fn tokens_spent_by_attempts_stay_used() {
    let throttle = Throttle::builder()
        .budget(Budget::tokens(10_000, secs(60)))
        .retry(Retry::attempts(3).backoff(Backoff::fixed(millis(0))))
        .build()
        .unwrap();
    let result = throttle
        .run(800, |attempt| async move {
            attempt.spend(100);
            if attempt.number < 2 {
                return Err("lost");
            }
            attempt.spend(50);
            Ok(())
        })
        .await;
    assert_eq!((result, throttle.snapshot().tokens_used), (Ok(()), 350));

    let cancelled: Result<Result<(), RunError<()>>, _> = tokio::time::timeout(
        secs(1),
        throttle.run(800, |attempt| async move {
            attempt.spend(7);
            std::future::pending().await
        }),
    )
    .await;
    assert!(cancelled.is_err());
    assert_eq!(throttle.snapshot().tokens_used, 357, "what a cancelled attempt reported");
}

/// Regression: the reports of a stream counted only when it ended, so one above its estimate delayed no other caller.
#[tokio::test(start_paused = true)]
async fn tokens_beyond_the_estimate_count_while_it_runs() {
    let throttle = Throttle::builder().budget(Budget::tokens(1_000, secs(60))).build().unwrap();
    let used = || throttle.snapshot().tokens_used;
    let streamed = throttle.run(100, |attempt| async move {
        for _ in 0..10 {
            attempt.spend(100);
            tokio::time::sleep(secs(1)).await;
        }
        Ok::<_, ()>(())
    });
    let watched = async {
        // Between two reports.
        tokio::time::sleep(millis(500)).await;
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(used());
            tokio::time::sleep(secs(3)).await;
        }
        seen
    };
    let (streamed, seen) = tokio::join!(streamed, watched);
    assert_eq!((streamed, seen), (Ok(()), vec![100, 400, 700, 1_000]));
    assert!(throttle.try_acquire(1).is_err());

    tokio::time::sleep(secs(120)).await;
    let mut permit = throttle.try_acquire(100).unwrap();
    permit.spend(60);
    assert_eq!(used(), 100, "the estimate");
    permit.spend(840);
    assert_eq!(used(), 900);
    assert!(throttle.try_acquire(200).is_err(), "others wait for what it has used");
    permit.settle(Outcome::success().spent(Cost::from(250)));
    assert_eq!(used(), 250);
}

/// Regression: reports reached the budgets only after a poll of the work, which a task that it waits for does not cause.
#[tokio::test(start_paused = true)]
async fn tokens_count_while_another_task_reports_them() {
    let throttle = Throttle::builder().budget(Budget::tokens(1_000, secs(60))).build().unwrap();
    let (reported, is_reported) = oneshot::channel();
    let (finish, is_finished) = oneshot::channel::<()>();
    let mut stream = Some((reported, is_finished));
    let running = throttle.clone();
    let run = tokio::spawn(async move {
        let work = |attempt: Attempt| {
            let (reported, is_finished) = stream.take().unwrap();
            async move {
                let stream = tokio::spawn(async move {
                    attempt.spend(500);
                    reported.send(attempt).unwrap();
                    is_finished.await
                });
                stream.await.unwrap()
            }
        };
        running.run(100, work).await
    });
    let attempt = is_reported.await.unwrap();
    assert_eq!(throttle.snapshot().tokens_used, 500);
    finish.send(()).unwrap();
    assert_eq!(run.await.unwrap(), Ok(()));
    attempt.spend(500);
    assert_eq!(throttle.snapshot().tokens_used, 500, "a report after the end");
}

/// Regression: reports of blocking work counted when it ended.
#[test]
fn tokens_of_blocking_work_count_while_it_runs() {
    let throttle = Throttle::builder().budget(Budget::tokens(1_000, secs(60))).build().unwrap();
    let used = || throttle.snapshot().tokens_used;
    let seen = throttle.run_blocking(100, |attempt| {
        attempt.spend(500);
        Ok::<_, ()>(used())
    });
    assert_eq!((seen, used()), (Ok(500), 500));
}
