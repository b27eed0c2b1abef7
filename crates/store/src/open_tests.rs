//! Valid addresses open a store; errors of the others say what is wrong.

use super::*;

#[test]
fn obsolete_option_of_dynamodb_is_ignored() {
    for (options, is_given) in [("region=x&speculative=false", "true"), ("region=x", "false")] {
        let parsed = dynamodb_options("dynamodb://limits", "//limits", options).unwrap();
        assert!(format!("{parsed:?}").contains(&format!("is_speculative_given: {is_given}")), "{parsed:?}");
    }
}

#[tokio::test]
async fn file_address_is_parsed_with_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("limits.db").display().to_string();
    for url in
        [format!("sqlite:{path}"), format!("sqlite://{path}?durable=commit&namespace=prod&size_max=8000000")]
    {
        assert_eq!(open(&url).await.unwrap().capabilities().engine, "sqlite");
    }
    assert!(!open("sqlite::memory:?namespace=prod").await.unwrap().capabilities().is_durable);
    let table = [
        ("sqlite:", "`sqlite:` names no file: write sqlite:PATH or sqlite::memory:"),
        ("sqlite://x.db", "`sqlite://x.db` names no file: write sqlite:PATH or sqlite:///PATH"),
        ("sqlite:x.db?durable=never", "durable is `never`, expected commit or second"),
        ("sqlite:x.db?size_max=-1", "size_max is `-1`, which is not a number of bytes"),
        ("sqlite:x.db?deadline_ms=0", "deadline_ms is `0`, outside 1..=60000 milliseconds"),
        ("sqlite:x.db?size_max=1000", "`size_max` is 1000 bytes, and must be at least 1048576"),
        (
            "sqlite:x.db?mode=ro",
            "`sqlite:x.db?mode=ro` has no option `mode`; expected namespace, durable, size_max, deadline_ms, \
             minutely_usage_days, hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days",
        ),
        (
            "sqlite::memory:?durable=commit",
            "`sqlite::memory:?durable=commit` has no option `durable`; expected namespace, \
             minutely_usage_days, hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days",
        ),
    ];
    for (url, sentence) in table {
        assert_eq!(open(url).await.unwrap_err().to_string(), sentence);
    }
}

#[tokio::test]
async fn invalid_dynamodb_address_is_rejected() {
    let table = [
        ("dynamodb:limits", "`dynamodb:limits` names no table: write dynamodb://TABLE"),
        ("dynamodb://", "`dynamodb://` names no table: write dynamodb://TABLE"),
        ("dynamodb://limits?timeout_ms=soon", "timeout_ms is `soon`, which is not a number of milliseconds"),
        ("dynamodb://limits?deadline_ms=1h", "deadline_ms is `1h`, outside 1..=60000 milliseconds"),
        ("dynamodb://limits?rejections_ms=5000", "rejections for 5s, and must be from 0s to 1s"),
        ("dynamodb://limits?region=x&timeout_ms=0", "`timeout` is 0s, and must be longer"),
        (
            "dynamodb://limits?table=x",
            "`dynamodb://limits?table=x` has no option `table`; expected namespace, region, endpoint, \
             rejections_ms, deadline_ms, timeout_ms, minutely_usage_days, hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days",
        ),
    ];
    for (url, sentence) in table {
        assert_eq!(open(url).await.unwrap_err().to_string(), sentence);
    }
}

#[tokio::test]
async fn unescaped_password_is_rejected_and_not_shown() {
    for url in [
        "redis://me:s3cr/et@h:6379/0",
        "redis://:s3cr?et@h",
        "postgres://me:s3cr?et@db/x",
        "postgres://me:s3cr/et@db/x?sslmode=require",
        "redis://me:s3cr@x?et@h",
    ] {
        for error in [open(url).await.err(), lifecycle_at(url).err()] {
            let error = error.expect("an invalid address").to_string();
            assert!(!error.contains("s3cr") && !error.contains("et@"), "{error}");
        }
    }
    for url in
        ["redis://h:6379?namespace=a@b", "redis://h?namespace=a@b", "redis://me:x@h:6379/0?namespace=a@b"]
    {
        assert!(check_login(url).is_ok(), "{url}");
    }
}

#[tokio::test]
async fn invalid_address_is_rejected_with_valid_forms() {
    let table = [
        (
            "",
            "`` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
        ),
        (
            "mysql://x",
            "`mysql://x` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
        ),
        (
            "memory:x",
            "`memory:x` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
        ),
        (
            "memory:?durable=commit",
            "`memory:?durable=commit` has no option `durable`; expected namespace, subjects_max, \
             minutely_usage_days, hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days",
        ),
        ("memory:?subjects_max=few", "subjects_max is `few`, which is not a number of subjects"),
        ("memory:?subjects_max=0", "subjects_max is 0, outside 1..=268435456"),
        ("memory:?namespace", "the option `namespace` of `memory:?namespace` has no value"),
        (
            "memory:?namespace=a&namespace=b",
            "the option `namespace` of `memory:?namespace=a&namespace=b` is given twice",
        ),
        (
            "a\u{1b}b",
            "`a\\u{1b}b` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
        ),
    ];
    for (url, sentence) in table {
        assert_eq!(open(url).await.unwrap_err().to_string(), sentence);
    }
    assert!(open("memory:?namespace=a%23b").await.is_ok(), "nothing is decoded");
    assert!(open("memory:?namespace=a#b").await.is_err(), "a name cannot contain `#`");
}

/// The retention options of all engines.
#[tokio::test]
async fn address_sets_retention() {
    const OPTIONS: &str =
        "minutely_usage_days=2&hourly_usage_days=7&daily_usage_days=36500&monthly_usage_days=90&audit_days=1";
    let days = |days: u64| Some(std::time::Duration::from_secs(days * 86_400));
    let retention =
        Retention { minutes: days(2), hours: days(7), days: days(36_500), months: days(90), audit: days(1) };
    let shown = format!("{retention:?}");
    assert!(format!("{:?}", sqlite_options("sqlite:x.db", "x.db", OPTIONS).unwrap()).contains(&shown));
    assert!(format!("{:?}", postgres_options("postgres://h/d", OPTIONS).unwrap().0).contains(&shown));
    assert!(format!("{:?}", redis_options("redis://h", OPTIONS).unwrap()).contains(&shown));
    assert!(format!("{:?}", dynamodb_options("dynamodb://t", "//t", OPTIONS).unwrap()).contains(&shown));
    assert!(
        format!("{:?}", redis_options("redis://h", "audit_days=forever").unwrap()).contains("audit: None")
    );
    assert!(open(&format!("memory:?{OPTIONS}")).await.is_ok());

    for place in ["memory:", "sqlite::memory:", "sqlite:x.db", "postgres://h/d", "redis://h", "dynamodb://t"]
    {
        for (option, value) in [
            ("audit_days", "0"),
            ("minutely_usage_days", "0"),
            ("hourly_usage_days", "36501"),
            ("monthly_usage_days", "2w"),
        ] {
            let error = open(&format!("{place}?{option}={value}")).await.unwrap_err().to_string();
            assert_eq!(error, format!("{option} is `{value}`, expected 1..=36500 or forever"), "{place}");
        }
    }
}

#[tokio::test]
async fn retention_out_of_bounds_is_refused() {
    let brief = Retention { audit: Some(std::time::Duration::from_secs(60)), ..Retention::default() };
    let error = Memory::with(MemoryOptions::new().retention(brief)).unwrap_err().to_string();
    assert_eq!(error, "retention.audit is 60s, outside 1 hour..=36500 days");
}
