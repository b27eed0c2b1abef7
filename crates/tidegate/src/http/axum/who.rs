//! Whose request it is, and what it costs.

use ::http::header::AUTHORIZATION;
use ::http::{HeaderName, Request};
use tidegate_core::limit::name::EntityId;

/// Whose request it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Key {
    /// This entity's.
    Of(EntityId),
    /// Nobody said.
    Nobody,
    /// There was no token, or one that nobody knows.
    NoToken,
    /// Something was said that is no key; and what is wrong with it, for whoever said it.
    Invalid(String),
}

impl From<Option<EntityId>> for Key {
    fn from(entity: Option<EntityId>) -> Self {
        entity.map_or(Self::Nobody, Self::Of)
    }
}

/// Finds whose request it is.
pub trait Who<B> {
    /// Whose.
    fn who(&self, request: &Request<B>) -> Key;
}

/// By the value of a header, which is the entity's id.
#[derive(Debug, Clone)]
pub struct ByHeader(pub(super) HeaderName);

impl<B> Who<B> for ByHeader {
    fn who(&self, request: &Request<B>) -> Key {
        let Some(value) = request.headers().get(&self.0) else { return Key::Nobody };
        let Ok(text) = value.to_str() else { return Key::Invalid(format!("`{}` is no text", self.0)) };
        EntityId::new(text).map_or_else(|invalid| Key::Invalid(format!("`{}`: {invalid}", self.0)), Key::Of)
    }
}

/// By the token of `Authorization: Bearer`, and a function that knows whose it is.
#[derive(Debug, Clone)]
pub struct ByToken<G>(pub(super) G);

impl<B, G: Fn(&str) -> Option<EntityId>> Who<B> for ByToken<G> {
    fn who(&self, request: &Request<B>) -> Key {
        let value = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = value.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        token.filter(|token| !token.is_empty()).and_then(&self.0).map_or(Key::NoToken, Key::Of)
    }
}

/// By what a function finds in the request.
#[derive(Debug, Clone)]
pub struct ByKey<G>(pub(super) G);

impl<B, K: Into<Key>, G: Fn(&Request<B>) -> K> Who<B> for ByKey<G> {
    fn who(&self, request: &Request<B>) -> Key {
        (self.0)(request).into()
    }
}

/// Units of limits.
pub type Units = Vec<(&'static str, u64)>;

/// Says what a request costs. Any `Fn(&Request<B>) -> Vec<(&str, u64)>` does; [`OneRequest`] is the default.
pub trait Price<B> {
    /// How many units of which limits. None at all means that nothing is drawn: for checks of health, say.
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
