//! Every spelling of an authority maps to one key, and no output shows a password.

use proptest::prelude::*;

use super::*;

fn key(text: &str) -> Result<String, InvalidAuthority> {
    Authority::new(text).map(|authority| authority.to_string())
}

#[test]
fn every_spelling_maps_to_one_key() {
    let table = [
        ("h", "h"),
        ("H.", "h"),
        ("http://h:80", "h"),
        ("HTTP://H:80/", "h"),
        ("https://u:p@h/x", "h"),
        ("https://h:443?q=http://x", "h"),
        ("ws://h:80", "h"),
        ("wss://h:443#f", "h"),
        ("h:80", "h"),
        ("h:443/x", "h"),
        ("//h/x", "h"),
        ("http://h:/x", "h"),
        ("http://h:0080/", "h"),
        ("h/a@b:c", "h"),
        ("h?x=http://y/", "h"),
        ("h#@z", "h"),
        ("u@h", "h"),
        ("u:p@h:443", "h"),
        ("http://u:p@ss@h", "h"),
        ("http://@h", "h"),
        ("http://h:443", "h:443"),
        ("https://h:80", "h:80"),
        ("wss://h:80", "h:80"),
        ("redis://h:80", "h:80"),
        ("redis://h:6379/0", "h:6379"),
        ("h:8080", "h:8080"),
        ("h.:8080", "h:8080"),
        ("https://API.Example.COM./v1", "api.example.com"),
        ("my_service-1:65535", "my_service-1:65535"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("[::1]:80", "[::1]"),
        ("http://[0:0:0:0:0:0:0:1]/", "[::1]"),
        ("https://u:p@[2001:DB8::0:1]:8443/x", "[2001:db8::1]:8443"),
        ("[::ffff:192.0.2.1]", "[::ffff:192.0.2.1]"),
        ("1a.2b", "1a.2b"),
        ("1.example", "1.example"),
        ("ab--cd", "ab--cd"),
    ];
    for (text, expected) in table {
        assert_eq!(key(text).as_deref(), Ok(expected), "{text}");
    }
}

#[test]
fn hosts_are_lower_case_and_without_default_ports() {
    let table = [
        ("Example.COM", "example.com"),
        ("s.e.com:80", "s.e.com"),
        ("s.e.com:443", "s.e.com"),
        ("s.e.com:8080", "s.e.com:8080"),
        ("[2001:db8::1]:443", "[2001:db8::1]"),
        ("[2001:db8::1]:8443", "[2001:db8::1]:8443"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ];
    for (text, expected) in table {
        assert_eq!(key(text).as_deref(), Ok(expected), "{text}");
    }
    assert_eq!(key(""), Err(InvalidAuthority::Empty));
    assert_eq!(key(":80"), Err(InvalidAuthority::Empty));
    assert_eq!(key("invalid::domain"), Err(InvalidAuthority::Port));
}

#[test]
fn a_url_with_the_default_port_is_the_same_key() {
    assert_eq!(Authority::new("https://EXAMPLE.com:443"), Authority::new("https://example.com"));
}

#[test]
fn letters_beyond_ascii_become_punycode_in_lower_case() {
    let table = [
        ("https://BÜCHER.example/", "xn--bcher-kva.example"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("\u{212a}.example", "k.example"),
        ("\u{212b}.example", "xn--5ca.example"),
        ("faß.de", "xn--fa-hia.de"),
        ("FAẞ.de", "xn--fa-hia.de"),
        ("пример.рф", "xn--e1afmkfd.xn--p1ai"),
        ("ПРИМЕР.РФ:8080", "xn--e1afmkfd.xn--p1ai:8080"),
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("παράδειγμα.δοκιμή", "xn--hxajbheg2az3al.xn--jxalpdlp"),
        ("مثال.إختبار", "xn--mgbh0fb.xn--kgbechtv"),
        ("उदाहरण.परीक्षा", "xn--p1b6ci4b4b3a.xn--11b5bs3a9aj6g"),
        ("실례.테스트", "xn--9n2bp8q.xn--9t4b11yi5a"),
        ("דוגמה.טעסט", "xn--6dbbec0c.xn--deba0ad"),
        ("xn--ls8h.la", "xn--ls8h.la"),
    ];
    for (text, expected) in table {
        assert_eq!(key(text).as_deref(), Ok(expected), "{text}");
    }
}

#[test]
fn ambiguous_letters_are_refused() {
    let table = [
        "bu\u{308}cher.example",
        "ｅxample.com",
        "ﬁ.example",
        "example\u{200d}.com",
        "soft\u{ad}hyphen.com",
        "ſ.example",
        "İ.example",
        "a\u{301}.example",
        "か\u{3099}.example",
        "\u{1100}\u{1161}.example",
        "क\u{93c}.example",
        "①.example",
        "１27.0.0.1",
        "💩.la",
        "ไทย.example",
        "\u{1f71}.example",
    ];
    for text in table {
        assert_eq!(key(text), Err(InvalidAuthority::Script { label: 1 }), "{text}");
    }
}

#[test]
fn invalid_authority_is_refused_with_its_reason() {
    use InvalidAuthority as No;
    let table = [
        ("", No::Empty),
        (".", No::Empty),
        ("/x", No::Empty),
        ("http://", No::Empty),
        ("http:///x", No::Empty),
        ("https://u:p@", No::Empty),
        ("http://:80", No::Empty),
        ("a..b", No::EmptyLabel { label: 2 }),
        (".a", No::EmptyLabel { label: 1 }),
        ("a..", No::EmptyLabel { label: 2 }),
        ("1http://h", No::Scheme),
        ("://h", No::Scheme),
        ("ht tp://h", No::Scheme),
        ("h:0", No::Port),
        ("h:65536", No::Port),
        ("h:99999999999999999999", No::Port),
        ("h:-1", No::Port),
        ("h:+80", No::Port),
        ("h:8 0", No::Port),
        ("h:", No::Port),
        ("http:/h", No::Port),
        ("http:h", No::Port),
        ("a:b:80", No::Port),
        ("::1", No::Ipv6),
        ("http://user:pa/ss@h", No::Port),
        ("a%2eb", No::Percent),
        ("[fe80::1%25eth0]", No::Percent),
        ("http://good\\@evil", No::Backslash),
        ("http://a\\b", No::Backslash),
        ("a b", No::Letter { label: 1 }),
        (" h", No::Letter { label: 1 }),
        ("h\n", No::Letter { label: 1 }),
        ("a.b\0", No::Letter { label: 2 }),
        ("a.b!c", No::Letter { label: 2 }),
        ("ü\u{a0}", No::Letter { label: 1 }),
        ("-a.b", No::Hyphen { label: 1 }),
        ("a.b-", No::Hyphen { label: 2 }),
        ("-ü", No::Hyphen { label: 1 }),
        ("a.xn--", No::Punycode { label: 2 }),
        ("xn--a", No::Punycode { label: 1 }),
        ("xn--abc-", No::Punycode { label: 1 }),
        ("xn--99999999", No::Punycode { label: 1 }),
        ("xn--bücher", No::Punycode { label: 1 }),
        ("xn--bcher-2pa", No::Punycode { label: 1 }),
        ("127.1", No::Ipv4),
        ("0177.0.0.1", No::Ipv4),
        ("127.0.0.256", No::Ipv4),
        ("1.2.3.4.5", No::Ipv4),
        ("0x7f.0.0.0x1", No::Ipv4),
        ("2130706433", No::Ipv4),
        ("example.1", No::Ipv4),
        ("[::1", No::Ipv6),
        ("[]", No::Ipv6),
        ("[::1]x", No::Ipv6),
        ("[::g]", No::Ipv6),
        ("[127.0.0.1]", No::Ipv6),
        ("[v1.a]", No::Ipv6),
        ("[[::1]]", No::Ipv6),
        ("a]:80", No::Ipv6),
    ];
    for (text, expected) in table {
        assert_eq!(key(text), Err(expected), "{text}");
    }
}

#[test]
fn every_length_has_a_bound() {
    let label = "a".repeat(64);
    let host = ["a".repeat(63).as_str(); 4].join(".");
    let text = format!("http://h/{}", "x".repeat(TEXT_MAX));
    let table = [
        (label.clone(), "a label of the host", 64, LABEL_MAX),
        ("ü".repeat(64), "a label of the host", 128, LABEL_MAX),
        (host, "the host", 255, HOST_MAX),
        (text, "the text", TEXT_MAX + 9, TEXT_MAX),
    ];
    for (text, part, bytes, max) in table {
        assert_eq!(key(&text), Err(InvalidAuthority::Long { part, bytes, max }), "{text}");
    }
    assert_eq!(key(&label[1..]).as_deref(), Ok(&label[1..]));
}

#[test]
fn no_error_shows_a_password() {
    let table = [
        "secret:secret@a b",
        "http://u:secret/secret@h",
        "secret:secret",
        "http://u:secret@-secret",
        "xn--secret@",
    ];
    for text in table {
        let error = Authority::new(text).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    }
    let authority = Authority::new("https://user:secret@h:9/secret?secret#secret").unwrap();
    assert_eq!(format!("{authority} {authority:?}"), "h:9 \"h:9\"");
    let error = Account::new(authority, "secret\n").unwrap_err();
    assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
}

#[test]
fn an_account_is_a_name_at_an_authority() {
    let at = |text, name| Account::new(Authority::new(text).unwrap(), name);
    assert_eq!(at("https://h", "a"), at("http://H:80", "a"));
    assert_ne!(at("https://h", "a"), at("https://h", "b"));
    assert_ne!(at("https://h", "a"), at("https://i", "a"));
    let account = at("h:8080", "team a").unwrap();
    assert_eq!((account.authority().as_str(), account.name()), ("h:8080", "team a"));
    assert_eq!(at("h", ""), Err(InvalidAccount::Empty));
    assert_eq!(at("h", "a\tb"), Err(InvalidAccount::Letter { at: 1 }));
    assert_eq!(at("h", &"a".repeat(257)), Err(InvalidAccount::Long { bytes: 257 }));
}

#[test]
fn a_key_is_found_by_its_text() {
    let keys = std::collections::BTreeMap::from([(Authority::new("https://H:8443/").unwrap(), 1)]);
    assert_eq!(keys.get("h:8443"), Some(&1));
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "(https?://|wss?://|x://|//)?([a-z:]{0,4}@)?[a-zA-ZüÜßяЯ例0-9._-]{1,20}(:[0-9]{0,6})?([/?#].{0,5})?",
        "(http://)?\\[[0-9a-f:.]{0,30}\\](:[0-9]{1,5})?",
        "(http://)?[0-9x.]{1,16}(:[0-9]{1,5})?",
        "(xn--[a-z0-9-]{0,20}\\.){0,2}xn--[a-z0-9-]{1,12}",
    ]
}

proptest! {
    #[test]
    fn key_is_ascii_bounded_and_idempotent(text in any_text()) {
        if let Ok(authority) = Authority::new(&text) {
            let key = authority.as_str();
            let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.:[]".contains(&byte);
            prop_assert!(key.bytes().all(fits), "{key}");
            prop_assert!(authority.host().len() <= HOST_MAX && !authority.host().is_empty());
            // A default port of another scheme survives only with a scheme that has no default.
            let again = match authority.port() {
                Some(80 | 443) => Authority::new(&format!("any://{key}")),
                _ => Authority::new(key),
            };
            prop_assert_eq!(again, Ok(authority));
        }
    }

    #[test]
    fn any_spelling_of_an_authority_is_one_key(
        host in "[a-z][a-z0-9]{0,10}(\\.[a-z][a-z0-9]{0,10}){0,3}",
        port in prop::option::of(1_u16..),
        user in prop::option::of("[a-zA-Z0-9:@!$&'()*+,;=._~-]{0,12}"),
        path in "([/?#][ -~]{0,12})?",
        is_upper in any::<bool>(),
        has_dot in any::<bool>(),
    ) {
        let port = port.filter(|port| *port != 80);
        let wanted = port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
        let host = if is_upper { host.to_uppercase() } else { host };
        let user = user.map_or_else(String::new, |user| format!("{user}@"));
        let (dot, port) = (if has_dot { "." } else { "" }, port.unwrap_or(80));
        let text = format!("http://{user}{host}{dot}:{port}{path}");
        prop_assert_eq!(key(&text), Ok(wanted), "{}", text);
    }
}
