//! Extracts the entity of a request, and its cost.

use ::http::header::AUTHORIZATION;
use ::http::{HeaderName, Request};
use tidegate_core::limit::name::EntityId;

/// The entity that a request draws for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Key {
    /// This entity.
    Of(EntityId),
    /// The request names none.
    Missing,
    /// The token is missing or unknown.
    NoToken,
    /// The key is malformed; with the reason, for the client.
    Invalid(String),
}

impl From<Option<EntityId>> for Key {
    fn from(entity: Option<EntityId>) -> Self {
        entity.map_or(Self::Missing, Self::Of)
    }
}

/// Extracts the entity of a request.
pub trait KeyExtractor<B> {
    /// The entity.
    fn extract(&self, request: &Request<B>) -> Key;
}

/// By the value of a header: the entity's id.
#[derive(Debug, Clone)]
pub struct ByHeader(pub(super) HeaderName);

impl<B> KeyExtractor<B> for ByHeader {
    fn extract(&self, request: &Request<B>) -> Key {
        let Some(value) = request.headers().get(&self.0) else { return Key::Missing };
        let Ok(text) = value.to_str() else { return Key::Invalid(format!("`{}` is not text", self.0)) };
        EntityId::new(text).map_or_else(|invalid| Key::Invalid(format!("`{}`: {invalid}", self.0)), Key::Of)
    }
}

/// By the token of `Authorization: Bearer`, and a function that looks it up.
#[derive(Debug, Clone)]
pub struct ByToken<G>(pub(super) G);

impl<B, G: Fn(&str) -> Option<EntityId>> KeyExtractor<B> for ByToken<G> {
    fn extract(&self, request: &Request<B>) -> Key {
        let value = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = value.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        token.filter(|token| !token.is_empty()).and_then(&self.0).map_or(Key::NoToken, Key::Of)
    }
}

/// By a function of the request.
#[derive(Debug, Clone)]
pub struct ByKey<G>(pub(super) G);

impl<B, K: Into<Key>, G: Fn(&Request<B>) -> K> KeyExtractor<B> for ByKey<G> {
    fn extract(&self, request: &Request<B>) -> Key {
        (self.0)(request).into()
    }
}

/// Units by limit name.
pub type Units = Vec<(&'static str, u64)>;

/// The cost of a request. Implemented by any `Fn(&Request<B>) -> Vec<(&str, u64)>`; [`OneRequest`] is the
/// default.
pub trait Price<B> {
    /// The units per limit. An empty list draws nothing, for example for health checks.
    fn price(&self, request: &Request<B>) -> Units;
}

/// Every request costs one unit of `rpm`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OneRequest;

impl<B> Price<B> for OneRequest {
    fn price(&self, _: &Request<B>) -> Units {
        vec![("rpm", 1)]
    }
}

impl<B, G: Fn(&Request<B>) -> Units> Price<B> for G {
    fn price(&self, request: &Request<B>) -> Units {
        self(request)
    }
}
