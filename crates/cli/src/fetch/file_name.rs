//! Maps an address to a file name: deterministic, unique and safe on every file system.
//!
//! A path of lower-case letters, digits, `-`, `_` and `.` is used as it is. File names contain a dot and
//! folder names contain none, so that `/a` and `/a/b` can coexist. Any other path (with a query, capitals,
//! other characters, names that a system reserves, too long) is sanitized and made unique by a `~`, which no
//! plain name contains, and 128 bits of the address. Capitals are not plain because some file systems ignore
//! case.
//!
//! An address without an extension gets that of the content type, or else `.data`. A plain name then ends in
//! `~`, so that `/about` and `/about.html` can coexist.

use std::iter;

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
/// The name of a page whose address ends in a slash, without its extension.
const INDEX: &str = "_index";
/// Content types and their extensions.
const EXTENSIONS: [(&str, &str); 22] = [
    ("application/gzip", "gz"),
    ("application/javascript", "js"),
    ("application/json", "json"),
    ("application/pdf", "pdf"),
    ("application/xhtml+xml", "xhtml"),
    ("application/xml", "xml"),
    ("application/zip", "zip"),
    ("audio/mpeg", "mp3"),
    ("image/avif", "avif"),
    ("image/gif", "gif"),
    ("image/jpeg", "jpg"),
    ("image/png", "png"),
    ("image/svg+xml", "svg"),
    ("image/webp", "webp"),
    ("text/css", "css"),
    ("text/csv", "csv"),
    ("text/html", "html"),
    ("text/javascript", "js"),
    ("text/markdown", "md"),
    ("text/plain", "txt"),
    ("text/xml", "xml"),
    ("video/mp4", "mp4"),
];

/// The path of a page's file, relative to the folder of the fetch, separated by `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileName {
    /// With the extension of the address.
    Whole(String),
    /// Without an extension, which depends on the content type; `mark` goes before it.
    Bare { stem: String, mark: &'static str },
}

impl FileName {
    /// The name for a content type with this extension.
    pub(crate) fn with(&self, extension: Option<&str>) -> String {
        match (self, extension) {
            (Self::Whole(name), _) => name.clone(),
            (Self::Bare { stem, .. }, None) => format!("{stem}{BARE}"),
            (Self::Bare { stem, mark }, Some(extension)) => format!("{stem}{mark}.{extension}"),
        }
    }

    /// All names that the page may have.
    pub(crate) fn all(&self) -> impl Iterator<Item = String> + '_ {
        let extensions: &[(&str, &str)] = match self {
            Self::Whole(_) => &[],
            Self::Bare { .. } => &EXTENSIONS,
        };
        iter::once(None)
            .chain(extensions.iter().map(|(_, extension)| Some(*extension)))
            .map(|it| self.with(it))
    }
}

/// The extension for a `Content-Type`, if it is a common one.
pub(crate) fn extension(content_type: &str) -> Option<&'static str> {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    EXTENSIONS.iter().find(|(name, _)| essence.eq_ignore_ascii_case(name)).map(|(_, extension)| *extension)
}

/// The name of a page's file.
pub(crate) fn file_name(address: &Address, key: Key) -> FileName {
    let host = host_folder(address);
    let path = address.url.path().trim_start_matches('/');
    let (folders, name) = path.rsplit_once('/').map_or((None, path), |(folders, name)| (Some(folders), name));
    let folders = || folders.into_iter().flat_map(|folders| folders.split('/'));
    let is_plain = address.url.query().is_none()
        && !address.url.path().starts_with("//")
        && path.len() <= PLAIN_MAX
        && folders().count() <= FOLDERS_MAX
        && folders().all(|folder| is_plain_word(folder) && !folder.contains('.'));
    if is_plain && (name.is_empty() || is_plain_word(name) && !name.ends_with(BARE)) {
        let folders: String = folders().flat_map(|folder| [folder, "/"]).collect();
        let path = |name: &str| format!("{host}/{folders}{name}");
        return match name {
            "" => FileName::Bare { stem: path(INDEX), mark: "" },
            _ if name.contains('.') => FileName::Whole(path(name)),
            _ => FileName::Bare { stem: path(name), mark: "~" },
        };
    }
    let folders = folders().filter(|folder| !folder.is_empty()).take(FOLDERS_MAX);
    let folders: String = folders.map(|folder| safe(folder, FOLDER_CUT) + "~/").collect();
    let (stem, ending) = name.rsplit_once('.').unwrap_or((name, ""));
    let is_ending = !stem.is_empty()
        && (1..=ENDING_MAX).contains(&ending.len())
        && ending.bytes().all(|letter| letter.is_ascii_alphanumeric());
    let path = |stem: &str| format!("{host}/{folders}{}~{key}", safe(stem, STEM_CUT));
    if is_ending {
        return FileName::Whole(format!("{}.{}", path(stem), ending.to_ascii_lowercase()));
    }
    FileName::Bare { stem: path(name), mark: "" }
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
        file_name(&address, Key::of(&address.url)).with(None)
    }

    #[test]
    fn content_type_sets_a_missing_extension() {
        let table = [
            ("https://h/", Some("text/html; charset=utf-8"), "h/_index.html"),
            ("https://h/docs/", Some("Text/HTML"), "h/docs/_index.html"),
            ("https://h/about", Some("text/html"), "h/about~.html"),
            ("https://h/about", Some("application/x-own"), "h/about.data"),
            ("https://h/about", None, "h/about.data"),
            ("https://h/a.bin", Some("text/html"), "h/a.bin"),
        ];
        for (url, content_type, file) in table {
            let address = Address::parse(url).expect("an address");
            let name = file_name(&address, Key::of(&address.url));
            let named = name.with(content_type.and_then(extension));
            assert_eq!(named, file, "{url} {content_type:?}");
            assert!(name.all().any(|name| name == named), "a later run finds it");
        }
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
                // Several content types have the same extension.
                let of_page: HashSet<_> = file_name(&address, Key::of(&address.url)).all().collect();
                for name in of_page {
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
        }
        // No file has the path of another file's folder.
        for name in &names {
            for (end, _) in name.match_indices('/') {
                assert!(!names.contains(&name[..end]), "{name}");
            }
        }
    }
}
