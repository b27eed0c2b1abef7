//! Far sides grouped by the domain somebody registered: one key for `a.example.co.uk` and `b.example.co.uk`.
//!
//! Where the hosts of one owner share a limit, or a crawler is to be polite to the owner and not to each host, the
//! key is the registrable domain: one label more than the public suffix. Which suffixes are public is a list that
//! changes every week (<https://publicsuffix.org>); the one used here is built in, and as old as the version of the
//! crate `psl` in the lock file. A newer list may group otherwise, so such keys are for throttles of one process, and
//! not for names in a store.

use tidegate_core::authority::Authority;

/// The domain that somebody registered, without a port; what has none is answered as it is.
///
/// Ports are left out because the owner is the same whatever the port. Answered as they are, port included:
/// addresses, hosts of one label, public suffixes themselves, and names under a suffix that is not on the list,
/// such as `a.svc.cluster.local`, of which nobody can tell where one owner ends. Private suffixes count: `a.github.io`
/// and `b.github.io` have two owners.
///
/// ```
/// use tidegate::{Authority, registrable};
///
/// let key = |text| Authority::new(text).map(|authority| registrable(&authority).to_string());
/// assert_eq!(key("https://a.example.co.uk/x")?, "example.co.uk");
/// assert_eq!(key("https://b.example.co.uk:8443/")?, "example.co.uk");
/// assert_eq!(key("http://127.0.0.1:8080")?, "127.0.0.1:8080");
/// # Ok::<(), tidegate::InvalidAuthority>(())
/// ```
pub fn registrable(authority: &Authority) -> Authority {
    domain(authority.host()).unwrap_or_else(|| authority.clone())
}

fn domain(host: &str) -> Option<Authority> {
    // The end of an address is no suffix on the list either.
    let domain = psl::domain(host.as_bytes()).filter(|domain| domain.suffix().is_known())?;
    Authority::new(std::str::from_utf8(domain.as_bytes()).ok()?).ok()
}
