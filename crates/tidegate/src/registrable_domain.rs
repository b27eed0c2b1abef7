//! Groups upstreams by registrable domain: one key for `a.example.co.uk` and `b.example.co.uk`.
//!
//! When the hosts of one owner share a limit, or a crawler should be polite per owner instead of per host,
//! the key is the registrable domain: one label more than the public suffix. The public suffix list changes
//! every week (<https://publicsuffix.org>); the one used here is built in, and as old as the version of the
//! crate `psl` in the lock file. A newer list may group differently, so use such keys for throttles of one
//! process, not for names in a store.

use tidegate_core::authority::Authority;

/// The registrable domain of an authority, without a port; an authority that has none is returned unchanged.
///
/// Ports are dropped because the owner is the same for every port. Returned unchanged, port included, are
/// addresses, single-label hosts, public suffixes themselves, and names under a suffix that is not on the
/// list, such as `a.svc.cluster.local`, whose owner cannot be determined. Private suffixes count:
/// `a.github.io` and `b.github.io` have two owners.
///
/// ```
/// use tidegate::{Authority, registrable_domain};
///
/// let key = |text| Authority::new(text).map(|authority| registrable_domain(&authority).to_string());
/// assert_eq!(key("https://a.example.co.uk/x")?, "example.co.uk");
/// assert_eq!(key("https://b.example.co.uk:8443/")?, "example.co.uk");
/// assert_eq!(key("http://127.0.0.1:8080")?, "127.0.0.1:8080");
/// # Ok::<(), tidegate::InvalidAuthority>(())
/// ```
pub fn registrable_domain(authority: &Authority) -> Authority {
    domain(authority.host()).unwrap_or_else(|| authority.clone())
}

fn domain(host: &str) -> Option<Authority> {
    // The last part of an IP address is not a suffix on the list either.
    let domain = psl::domain(host.as_bytes()).filter(|domain| domain.suffix().is_known())?;
    Authority::new(std::str::from_utf8(domain.as_bytes()).ok()?).ok()
}
