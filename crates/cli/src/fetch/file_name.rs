//! Maps an address to a file name: deterministic, unique and safe on every file system.
//!
//! A path of lower-case letters, digits, `-`, `_` and `.` is used as it is. File names contain a dot and
//! folder names contain none, so that `/a` and `/a/b` can coexist. Any other path (with a query, capitals,
//! other characters, names that a system reserves, too long) is sanitized and made unique by a `~`, which no
//! plain name contains, and 128 bits of the address. Capitals are not plain because some file systems ignore
//! case.

use super::address::{Address, Key};

/// Maximum bytes and folders of a plain path.
const PLAIN_MAX: usize = 200;
const FOLDERS_MAX: usize = 8;
/// Maximum length of a sanitized host folder; a plain one may have [`HOST_MAX`] bytes.
const HOST_CUT: usize = 100;
const HOST_MAX: usize = 200;
/// Maximum lengths of a sanitized folder, stem and extension.
const FOLDER_CUT: usize = 32;
const STEM_CUT: usize = 64;
const ENDING_MAX: usize = 8;
/// The extension of a page that has none.
const BARE: &str = ".data";
/// The name of a page whose address ends in a slash.
const INDEX: &str = "_index.data";

/// The path of the page's file, relative to the folder of the fetch, separated by `/`.
pub(crate) fn file_name(address: &Address, key: Key) -> String {
    let host = host_folder(address);
    let path = address.url.path().trim_start_matches('/');
    let (folders, name) = path.rsplit_once('/').map_or((None, path), |(folders, name)| (Some(folders), name));
    let folders = || folders.into_iter().flat_map(|folders| folders.split('/'));
    let is_plain = address.url.query().is_none()
        && !address.url.path().starts_with("//")
        && path.len() <= PLAIN_MAX
        && folders().count() <= FOLDERS_MAX
        && folders().all(|folder| is_plain_word(folder) && !folder.contains('.'));
    let plain = match name {
        "" => Some(INDEX.to_owned()),
        _ if !is_plain_word(name) || name.ends_with(BARE) => None,
        _ if name.contains('.') => Some(name.to_owned()),
        _ => Some(format!("{name}{BARE}")),
    };
    if let (true, Some(name)) = (is_plain, plain) {
        let folders: String = folders().flat_map(|folder| [folder, "/"]).collect();
        return format!("{host}/{folders}{name}");
    }
    let folders = folders().filter(|folder| !folder.is_empty()).take(FOLDERS_MAX);
    let folders: String = folders.map(|folder| safe(folder, FOLDER_CUT) + "~/").collect();
    let (stem, ending) = name.rsplit_once('.').unwrap_or((name, ""));
    let is_ending = !stem.is_empty()
        && (1..=ENDING_MAX).contains(&ending.len())
        && ending.bytes().all(|letter| letter.is_ascii_alphanumeric());
    let (stem, ending) =
        if is_ending { (stem, format!(".{}", ending.to_ascii_lowercase())) } else { (name, BARE.to_owned()) };
    format!("{host}/{folders}{}~{key}{ending}", safe(stem, STEM_CUT))
}

/// One folder per origin. `+`, which no host name contains, precedes the scheme and the port.
fn host_folder(address: &Address) -> String {
    let host = address.host.host();
    let mut folder = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(ip) => format!("ip6+{}", ip.replace(':', "-")),
        None if is_kept_word(host) => format!("+{host}"),
        None => host.to_owned(),
    };
    if !address.is_https() {
        folder.push_str("+http");
    }
    if let Some(port) = address.host.port() {
        folder.push('+');
        folder.push_str(&port.to_string());
    }
    if folder.len() <= HOST_MAX {
        return folder;
    }
    let mut root = address.url.clone();
    root.set_path("/");
    root.set_query(None);
    format!("{}~{}", safe(&folder, HOST_CUT), Key::of(&root))
}

/// Whether a path segment can be used as it is.
fn is_plain_word(word: &str) -> bool {
    let is_plain =
        |letter: u8| letter.is_ascii_lowercase() || letter.is_ascii_digit() || b"-_.".contains(&letter);
    let begins = word.bytes().next().is_some_and(|letter| letter.is_ascii_alphanumeric());
    begins && word.bytes().all(is_plain) && !word.ends_with('.') && !is_kept_word(word)
}

/// Whether Windows reserves the name, with any extension.
fn is_kept_word(word: &str) -> bool {
    let stem = word.split('.').next().unwrap_or_default();
    let is_numbered = |name: &str| {
        let number = stem.strip_prefix(name);
        number.is_some_and(|number| number.len() == 1 && number.bytes().all(|digit| digit.is_ascii_digit()))
    };
    matches!(stem, "con" | "prn" | "aux" | "nul") || is_numbered("com") || is_numbered("lpt")
}

/// Replaces characters that have a meaning in some file system. The key keeps different pages apart.
fn safe(word: &str, cut: usize) -> String {
    let letter = |letter: char| match letter.to_ascii_lowercase() {
        letter @ ('a'..='z' | '0'..='9' | '-' | '+') => letter,
        _ => '_',
    };
    word.chars().take(cut).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn name(url: &str) -> String {
        let address = Address::parse(url).expect("an address");
        file_name(&address, Key::of(&address.url))
    }

    #[test]
    fn plain_address_is_its_own_name() {
        let table = [
            ("https://example.com/docs/page.html", "example.com/docs/page.html"),
            ("http://example.com/docs/page.html", "example.com+http/docs/page.html"),
            ("https://example.com:8443/a.b-c_d.tar.gz", "example.com+8443/a.b-c_d.tar.gz"),
            ("http://[2001:db8::1]:8080/a.txt", "ip6+2001-db8--1+http+8080/a.txt"),
            ("https://example.com/", "example.com/_index.data"),
            ("https://example.com/docs/", "example.com/docs/_index.data"),
            ("https://example.com/about", "example.com/about.data"),
            ("https://aux.example.com/a.txt", "+aux.example.com/a.txt"),
        ];
        for (url, file) in table {
            assert_eq!(name(url), file, "{url}");
        }
    }

    #[test]
    fn other_address_is_sanitized_and_made_unique() {
        let table = [
            ("https://h/a.html?q=1", "h/a~", ".html"),
            ("https://h/A.HTML", "h/a~", ".html"),
            ("https://h/x/%2e%2e%2fetc/passwd", "h/x~/", ".data"),
            ("https://h/nul.txt", "h/nul~", ".txt"),
            ("https://h/com1", "h/com1~", ".data"),
            ("https://h/a.data", "h/a~", ".data"),
            ("https://h/.htaccess", "h/_htaccess~", ".data"),
            ("https://h/a.d/b.html", "h/a_d~/b~", ".html"),
            ("https://h//a.html", "h/a~", ".html"),
            ("https://h/a.html.", "h/a_html_~", ".data"),
        ];
        for (url, begin, end) in table {
            let name = name(url);
            assert!(name.starts_with(begin) && name.ends_with(end), "{url}: {name}");
        }
    }

    #[test]
    fn names_are_safe_bounded_and_unique() {
        let parts = "a A a.b a.b/ a/ a/b a/b.c a.b/c.d index _index _index.data a.data a~b a?x a?X a? %61 %41 con con.txt \
                     ..%2f.. %2e a%00b é a//b a\\b ~ + a. -a .a";
        let long = ["x".repeat(300), "é/".repeat(200), "a/".repeat(40) + "b.html", "y".repeat(300) + ".html"];
        let hosts = "https://h http://h https://h:80 http://h:443 https://h:8080 https://con https://[::1] http://[::1]:8080 \
                     https://h-http";
        let longest_host = format!(
            "http://{}.{}:65535",
            ["a".repeat(63), "b".repeat(63), "c".repeat(63)].join("."),
            "d".repeat(60)
        );
        let hosts = hosts.split(' ').chain([longest_host.as_str()]);
        let (mut names, mut urls) = (HashSet::new(), HashSet::new());
        for host in hosts {
            for part in parts.split(' ').chain([""]).chain(long.iter().map(String::as_str)) {
                let address = Address::parse(&format!("{host}/{part}")).expect("an address");
                if !urls.insert(address.url.to_string()) {
                    continue;
                }
                let name = file_name(&address, Key::of(&address.url));
                assert!(name.len() <= 700, "{} bytes: {name}", name.len());
                for word in name.split('/') {
                    let is_safe = !word.is_empty()
                        && word.len() <= 255
                        && !word.starts_with('.')
                        && !word.ends_with('.');
                    assert!(is_safe && word.is_ascii() && !is_kept_word(word), "{name}");
                }
                // Unique even on a case-insensitive file system.
                assert!(names.insert(name.to_ascii_lowercase()), "{name} twice, of {}", address.url);
            }
        }
        // No file has the path of another file's folder.
        for name in &names {
            for (end, _) in name.match_indices('/') {
                assert!(!names.contains(&name[..end]), "{name}");
            }
        }
    }
}
