//! What a request is admitted under: its throttle and its cost.

use std::hash::Hash;

use ::http::Request;
use tidegate_core::authority::{Authority, InvalidAuthority};
use tidegate_core::cost::Cost;

use crate::keyed::Keyed;
use crate::throttle::Throttle;

/// Selects the throttle of a request.
pub trait Choose<R> {
    /// The throttle.
    ///
    /// # Errors
    /// If the request's host cannot be determined.
    fn choose(&self, request: &R) -> Result<Throttle, InvalidAuthority>;
}

/// One throttle for all requests.
impl<R> Choose<R> for Throttle {
    fn choose(&self, _: &R) -> Result<Throttle, InvalidAuthority> {
        Ok(self.clone())
    }
}

/// A throttle for each host, by the authority of the request's URI, or by its `Host` header without one.
#[derive(Debug, Clone)]
pub struct ByHost {
    pub(super) hosts: Keyed<Authority>,
}

impl<B> Choose<Request<B>> for ByHost {
    fn choose(&self, request: &Request<B>) -> Result<Throttle, InvalidAuthority> {
        Ok(self.hosts.throttle(&authority(request)?))
    }
}

/// A throttle for each key that a function extracts from a request.
#[derive(Debug, Clone)]
pub struct ByKey<K, G> {
    pub(super) keyed: Keyed<K>,
    pub(super) key: G,
}

impl<K, G, R> Choose<R> for ByKey<K, G>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    G: Fn(&R) -> K,
{
    fn choose(&self, request: &R) -> Result<Throttle, InvalidAuthority> {
        Ok(self.keyed.throttle(&(self.key)(request)))
    }
}

/// The cost of a request. Implemented by any `Fn(&R) -> Cost`; [`Unit`] is the default.
pub trait Weigh<R> {
    /// The cost.
    fn weigh(&self, request: &R) -> Cost;
}

/// Every request costs one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unit;

impl<R> Weigh<R> for Unit {
    fn weigh(&self, _: &R) -> Cost {
        Cost::request()
    }
}

impl<R, F: Fn(&R) -> Cost> Weigh<R> for F {
    fn weigh(&self, request: &R) -> Cost {
        self(request)
    }
}

/// The throttle and the cost of a request.
#[derive(Debug)]
pub(super) struct Terms<T, W> {
    pub(super) choose: T,
    pub(super) weigh: W,
}

/// The authority of a request.
fn authority<B>(request: &Request<B>) -> Result<Authority, InvalidAuthority> {
    let uri = request.uri();
    let Some(authority) = uri.authority() else {
        let host = request.headers().get(::http::header::HOST).and_then(|host| host.to_str().ok());
        return Authority::new(host.unwrap_or_default());
    };
    // With the scheme, which determines the default port.
    match uri.scheme_str() {
        Some(scheme) => Authority::new(&format!("{scheme}://{authority}")),
        None => Authority::new(authority.as_str()),
    }
}
