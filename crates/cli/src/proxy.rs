//! The configuration of a proxy: upstreams, keys, profiles and tenants, from flags or a file.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use tidegate_proxy::{Profiles, Proxy, ProxyBounds, Tenants, Upstream};

use crate::failure::Failure;
use crate::format;

/// A file of profiles, and a file of a key, has at most this many bytes.
const FILE_MAX: u64 = 1 << 20;

/// What a proxy is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProxySettings {
    /// `NAME=URL` or `NAME:PROFILE=URL`.
    pub(crate) upstreams: Vec<String>,
    /// Names of upstreams, and where their keys are: `env:VARIABLE` or a file.
    pub(crate) keys: BTreeMap<String, String>,
    /// A file of profiles.
    pub(crate) profiles: Option<PathBuf>,
    pub(crate) require_token: bool,
    pub(crate) within: Option<Duration>,
    pub(crate) within_max: Option<Duration>,
}

impl ProxySettings {
    /// Creates the proxy, which is to listen at `listen`.
    pub(crate) fn build(&self, listen: SocketAddr, tenants: Option<Tenants>) -> Result<Proxy, Failure> {
        let profiles = self.profiles.as_deref().map_or_else(|| Ok(Profiles::built_in()), read_profiles)?;
        let wrong = |error: tidegate_proxy::InvalidProxy| {
            Failure::usage(error.to_string()).next("see the format: tidegate proxy --help")
        };
        let mut keys = self.keys.clone();
        let mut builder = Proxy::builder();
        for text in &self.upstreams {
            let mut upstream = Upstream::parse(text, &profiles).map_err(wrong)?;
            if let Some(place) = keys.remove(upstream.name()) {
                upstream = upstream.key(read_key(&place)?);
            }
            builder = builder.upstream(upstream).map_err(wrong)?;
        }
        if let Some(name) = keys.keys().next() {
            let what = format!("a key is given for `{}`, which is no upstream", format::escape(name));
            return Err(Failure::usage(what).next("name the upstream as in NAME=URL"));
        }
        let is_open = self.require_token || !listen.ip().is_loopback();
        if is_open && tenants.is_none() {
            let what = "tokens are required, but there is no store that has them";
            return Err(Failure::usage(what).next("name the store with --store URL, or listen on 127.0.0.1"));
        }
        builder = if is_open { builder.require_token() } else { builder };
        if let Some(tenants) = tenants {
            builder = builder.tenants(tenants);
        }
        let mut bounds = ProxyBounds::default();
        bounds.within_max = self.within_max.unwrap_or(bounds.within_max);
        bounds.within = self.within.unwrap_or(bounds.within).min(bounds.within_max);
        builder.bounds(bounds).build().map_err(wrong)
    }
}

/// Fails if the address can be reached from other machines without TLS, which was not allowed.
pub(crate) fn check_exposure(listen: SocketAddr, has_tls: bool, without_tls: bool) -> Result<(), Failure> {
    if has_tls || without_tls || listen.ip().is_loopback() {
        return Ok(());
    }
    let what = format!(
        "{listen} can be reached from other machines without TLS: listen on 127.0.0.1, or allow it explicitly"
    );
    Err(Failure::usage(what)
        .next("use --tls-cert FILE --tls-key FILE, or --without-tls behind a proxy with TLS"))
}

/// The profiles of a file, with the built-in ones.
pub(crate) fn read_profiles(path: &Path) -> Result<Profiles, Failure> {
    let text = read(path)?;
    Profiles::read(&text).map_err(|error| {
        Failure::usage(format!("the profiles `{}`: {error}", path.display()))
            .next("see docs/proxy.md#profiles")
    })
}

fn read(path: &Path) -> Result<String, Failure> {
    let failed = |why: String| Failure::usage(format!("the file `{}` {why}", path.display()));
    let size = fs::metadata(path).map_err(|error| failed(format!("cannot be read: {error}")))?.len();
    if size > FILE_MAX {
        return Err(failed(format!("has more than {FILE_MAX} bytes")));
    }
    fs::read_to_string(path).map_err(|error| failed(format!("cannot be read: {error}")))
}

/// Reads a key from the environment, or from a file that only its owner can read.
fn read_key(place: &str) -> Result<String, Failure> {
    if let Some(name) = place.strip_prefix("env:") {
        let key = env::var(name).ok().filter(|key| !key.is_empty());
        return key.ok_or_else(|| {
            Failure::usage(format!("the variable {name} holds no key")).next("set it, or use a file")
        });
    }
    let path = Path::new(place);
    let mode = fs::metadata(path).map_or(0, |metadata| metadata.mode());
    if mode & 0o077 > 0 {
        let what = format!("the key file `{place}` can be read by others (mode {:04o})", mode & 0o7777);
        return Err(Failure::usage(what).next(format!("chmod 600 '{place}'")));
    }
    let key = read(path)?.trim().to_owned();
    if key.is_empty() {
        return Err(Failure::usage(format!("the key file `{place}` is empty")));
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn local() -> SocketAddr {
        ([127, 0, 0, 1], 0).into()
    }

    #[test]
    fn keys_come_from_files_that_others_cannot_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, "sk-real\n").unwrap();
        let place = path.display().to_string();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = read_key(&place).unwrap_err();
        assert!(error.what.ends_with("can be read by others (mode 0644)"), "{}", error.what);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_key(&place).unwrap(), "sk-real");
        assert!(read_key("env:TIDEGATE_NO_SUCH_KEY").unwrap_err().what.contains("TIDEGATE_NO_SUCH_KEY"));
    }

    #[test]
    fn invalid_settings_are_refused() {
        let upstreams = vec!["openai=http://127.0.0.1:1".to_owned()];
        let settings = |keys: &[(&str, &str)]| ProxySettings {
            upstreams: upstreams.clone(),
            keys: keys.iter().map(|(name, place)| ((*name).to_owned(), (*place).to_owned())).collect(),
            ..ProxySettings::default()
        };
        assert!(settings(&[]).build(local(), None).is_ok());
        let unknown = settings(&[("groq", "env:PATH")]).build(local(), None).unwrap_err();
        assert_eq!(unknown.what, "a key is given for `groq`, which is no upstream");
        let open = settings(&[]).build(([0, 0, 0, 0], 0).into(), None).unwrap_err();
        assert_eq!(open.what, "tokens are required, but there is no store that has them");
        let exposed = |has_tls, without_tls| check_exposure(([0, 0, 0, 0], 0).into(), has_tls, without_tls);
        assert!(exposed(false, false).is_err());
        assert!(exposed(true, false).is_ok() && exposed(false, true).is_ok());
    }
}
