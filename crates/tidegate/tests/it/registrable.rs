//! Hosts grouped by registrable domain, and authorities as map keys.

use std::collections::HashMap;
use std::hash::Hash;

use proptest::prelude::*;
use tidegate::{Account, Authority, registrable_domain};

fn authority(text: &str) -> Authority {
    Authority::new(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn hosts_of_one_domain_share_a_key() {
    let table = [
        ("a.example.co.uk", "example.co.uk"),
        ("https://b.example.co.uk/x", "example.co.uk"),
        ("A.B.C.Example.Co.UK.", "example.co.uk"),
        ("example.co.uk", "example.co.uk"),
        ("https://api.example.com:8443/v1", "example.com"),
        ("http://user:secret@example.com:8080", "example.com"),
        ("example.com:8080", "example.com"),
        ("alice.github.io", "alice.github.io"),
        ("www.alice.github.io", "alice.github.io"),
        ("bob.github.io:8080", "bob.github.io"),
        ("https://docs.пример.рф/", "xn--e1afmkfd.xn--p1ai"),
        ("a.xn--e1afmkfd.xn--p1ai:99", "xn--e1afmkfd.xn--p1ai"),
        // Everything under .ck is public, but www.ck is not.
        ("a.b.c.ck", "b.c.ck"),
        ("x.www.ck", "www.ck"),
        ("_dmarc.mail.example.org", "example.org"),
    ];
    for (text, expected) in table {
        assert_eq!(registrable_domain(&authority(text)).as_str(), expected, "{text}");
    }
}

#[test]
fn hosts_without_registrable_domain_stay_unchanged() {
    let table = [
        "127.0.0.1",
        "127.0.0.1:8080",
        "[::1]",
        "[2001:db8::1]:8443",
        "localhost",
        "localhost:3000",
        "com",
        "co.uk",
        "co.uk:8080",
        "github.io",
        "github.io:8080",
        "anything.ck",
        "xn--p1ai",
        "a.svc.cluster.local",
        "b.svc.cluster.local:8080",
        "db.internal",
        "a.1b",
    ];
    for text in table {
        let authority = authority(text);
        assert_eq!(registrable_domain(&authority), authority, "{text}");
    }
}

#[test]
fn domains_are_kept_apart() {
    let owners = ["alice.github.io", "bob.github.io", "example.co.uk", "example.com", "other.co.uk"];
    let keys: HashMap<Authority, &str> =
        owners.iter().map(|text| (registrable_domain(&authority(text)), *text)).collect();
    assert_eq!(keys.len(), owners.len());
}

/// The bounds on a key of a keyed throttle.
fn is_key<K: Hash + Eq + Clone + Send + Sync + 'static>(_: &K) {}

#[test]
fn authority_and_account_are_keys_in_any_spelling() {
    let account = |text, name| Account::new(authority(text), name).expect("a good name");
    let mut keys = HashMap::new();
    let first = (authority("https://EXAMPLE.com:443"), account("https://EXAMPLE.com:443", "key-1"));
    is_key(&first);
    is_key(&first.0);
    is_key(&first.1);
    keys.insert(first, 1);
    let again = (authority("https://example.com"), account("https://example.com", "key-1"));
    assert_eq!(keys.get(&again), Some(&1), "one authority and one account");
    let other = (authority("https://example.com"), account("https://example.com", "key-2"));
    assert_eq!(keys.get(&other), None, "accounts are separate");
    let grouped = (registrable_domain(&authority("https://a.example.com")), "key-1".to_owned());
    is_key(&grouped);
    assert_eq!(grouped.0, authority("example.com"));
}

proptest! {
    #[test]
    fn registrable_domain_is_idempotent_and_a_suffix(
        host in "([a-z0-9_][a-z0-9-]{0,5}[a-z0-9]\\.){0,4}(com|co\\.uk|github\\.io|ck|xn--p1ai|local|jp|kawasaki\\.jp|test)",
        port in prop::option::of(1_u16..),
    ) {
        let text = port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
        if let Ok(member) = Authority::new(&text) {
            let group = registrable_domain(&member);
            prop_assert_eq!(registrable_domain(&group), group.clone());
            prop_assert!(group == member || (group.port().is_none() && member.host().ends_with(group.host())));
        }
    }
}
