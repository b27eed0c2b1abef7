//! Balances, capacity and explanations of limits.

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::name::{LimitKey, LimitName, Subject};
use tidegate_core::limit::policy;
use tidegate_core::limit::resolve::{self, Source};

use crate::amounts::Cost;
use crate::policy::{OnExpiry, OnUnavailable, Version};
use crate::response::InvalidResponse;
use crate::seconds::Seconds;
use crate::text::{EntityId, LimitText, ResourceName};

wire! {
    /// The state of one limit of one bucket.
    #[serde(deny_unknown_fields)]
    pub struct LimitState {
        /// The entity; absent if all entities share the bucket (`across=entities` or `both`).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource; absent if all resources share the bucket (`across=resources` or `both`).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// The name of the limit.
        pub limit: String,
        /// Where the limit is defined: `system`, `resource gpt-4`, `entity acme`, `entity acme, resource
        /// gpt-4`, `defaults` or `this call`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub source: Option<String>,
        /// Available whole units; negative is debt.
        pub available: i64,
        /// Capacity of the bucket.
        pub burst: u64,
        /// Units per period.
        pub amount: u64,
        /// The period.
        pub period: Seconds,
        /// Units taken minus units returned, since first use.
        pub consumed: i64,
        /// Units requested.
        pub asked: u64,
        /// Time until the requested units are available: 0 is now, absent is never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
    }

    /// The limits of a subject and of the levels above it.
    #[serde(deny_unknown_fields)]
    pub struct Balances {
        /// The limits, the subject's own first.
        pub limits: Vec<LimitState>,
    }

    /// Utilization of a resource's limits, over all buckets.
    #[serde(deny_unknown_fields)]
    pub struct Capacities {
        /// One entry for each limit, ordered by name.
        pub limits: Vec<Capacity>,
    }

    /// Utilization of one limit, over all buckets of a resource.
    #[serde(deny_unknown_fields)]
    pub struct Capacity {
        /// The name of the limit, followed by `,across=entities` if all entities share one bucket.
        pub limit: String,
        /// Buckets with this limit.
        pub buckets: u64,
        /// The sum of their bursts.
        pub burst: u64,
        /// The sum of available units; debt counts as negative.
        pub available: i64,
        /// Units taken minus units returned, since first use.
        pub consumed: i64,
    }

    /// A request to be explained, not drawn.
    #[serde(deny_unknown_fields)]
    pub struct Ask {
        /// The requesting entity.
        pub entity: EntityId,
        /// The requested resource.
        pub resource: ResourceName,
        /// Units of each limit; at least one amount above 0.
        pub cost: Cost,
        /// Limits of this call, which replace the subject's own limits of the same names.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
    }

    /// Sets the units available in one bucket.
    #[serde(deny_unknown_fields)]
    pub struct PutBucket {
        /// An entity that draws from the bucket.
        pub entity: EntityId,
        /// A resource that it draws for.
        pub resource: ResourceName,
        /// The limit: `tpm`; `tpm,across=entities` for the pooled limit of that name; `tpm:1k/min` for a limit that was
        /// given with calls, or by a rule for Envoy.
        pub limit: String,
        /// The units available from now on, at most the burst; absent fills the bucket.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub units: Option<u64>,
    }

    /// The result of setting a bucket.
    #[serde(deny_unknown_fields)]
    pub struct BucketWritten {
        /// The number of administrative changes, including this one.
        pub version: Version,
        /// The state of the limit.
        pub limit: LimitState,
    }

    /// What would happen to a request, and why. Nothing was drawn.
    #[serde(deny_unknown_fields)]
    pub struct Explanation {
        /// The predicted outcome.
        pub would: Forecast,
        /// Time until the request could be granted, if it would have to wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
        /// Every applicable limit, the subject's own first.
        pub limits: Vec<LimitState>,
        /// What happens while the store is unavailable.
        pub on_unavailable: OnUnavailable,
        /// Where that is defined.
        pub on_unavailable_source: String,
        /// What happens to leases that expire.
        pub on_expiry: OnExpiry,
        /// Where that is defined.
        pub on_expiry_source: String,
        /// The number of administrative changes at the time of this explanation.
        pub version: Version,
    }
}

wire_as! {
    Would:
    /// The predicted outcome of a request.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum Forecast {
        /// It would be granted.
        Grant,
        /// It would have to wait.
        Wait,
        /// It could never be granted.
        Never,
    }
}

query! {
    /// Selects balances.
    #[serde(deny_unknown_fields)]
    pub struct BalanceQuery {
        /// The entity.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource; without it, every resource that the entity and its ancestors have used.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
    }
}

query! {
    /// Selects a resource.
    #[serde(deny_unknown_fields)]
    pub struct CapacityQuery {
        /// The resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
    }
}

impl Capacity {
    /// The limit.
    ///
    /// # Errors
    /// [`InvalidResponse`] for an invalid name.
    pub fn key(&self) -> Result<LimitKey, InvalidResponse> {
        self.limit.parse().map_err(InvalidResponse::of("limit"))
    }
}

impl LimitState {
    /// Converts a balance, with the source of its limit if known.
    pub fn new(balance: &Balance, source: Option<&Source>) -> Self {
        Self {
            entity: balance.subject.one_entity().cloned().map(EntityId),
            resource: balance.subject.one_resource().cloned().map(ResourceName),
            limit: balance.limit.to_string(),
            source: source.map(Source::to_string),
            available: balance.available,
            burst: balance.burst,
            amount: balance.amount,
            period: balance.period.into(),
            consumed: balance.consumed,
            asked: balance.asked,
            retry_after: balance.retry_after.map(Seconds::from),
        }
    }

    /// Converts into a balance, with the source of its limit if given.
    ///
    /// # Errors
    /// [`InvalidResponse`] for an invalid name, or a source that does not apply to this subject.
    pub fn check(self) -> Result<(Balance, Option<Source>), InvalidResponse> {
        let (entity, resource) = (self.entity.map(|entity| entity.0), self.resource.map(|name| name.0));
        let subject = Subject::pool(entity, resource);
        let source = self.source.map(|text| source(&text, &subject)).transpose()?;
        let balance = Balance {
            limit: LimitName::new(&self.limit).map_err(InvalidResponse::of("limit"))?,
            subject,
            available: self.available,
            burst: self.burst,
            amount: self.amount,
            period: self.period.as_duration(),
            consumed: self.consumed,
            asked: self.asked,
            retry_after: self.retry_after.map(Seconds::as_duration),
        };
        Ok((balance, source))
    }
}

impl Explanation {
    /// Returns the subject's outage and expiry behaviour, each with its source.
    ///
    /// # Errors
    /// [`InvalidResponse`] for an invalid share, or a source that does not apply to this subject.
    pub fn behaviour(&self, subject: &Subject) -> Result<Behaviour, InvalidResponse> {
        let on_unavailable = self.on_unavailable.try_into().map_err(InvalidResponse::of("on_unavailable"))?;
        Ok((
            (on_unavailable, source(&self.on_unavailable_source, subject)?),
            (self.on_expiry.into(), source(&self.on_expiry_source, subject)?),
        ))
    }
}

/// The behaviour of a subject while the store is unavailable and on lease expiry, each with its source.
pub type Behaviour = ((policy::OnUnavailable, Source), (policy::OnExpiry, Source));

/// Parses the source of a limit of this subject. The text alone may be ambiguous, because names may contain
/// `, resource `: it is compared with the sources that this subject can have.
fn source(text: &str, subject: &Subject) -> Result<Source, InvalidResponse> {
    let scopes = resolve::scopes(subject).map(Source::Policy);
    let known = scopes.into_iter().chain([Source::Defaults, Source::Call]);
    let invalid =
        || InvalidResponse { field: "source", why: format!("`{text}` is not a source of {subject}") };
    known.into_iter().find(|source| source.to_string() == text).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate_core::limit::name::Across;

    use super::*;

    fn balance(subject: &Subject) -> Balance {
        Balance {
            subject: subject.clone(),
            limit: LimitName::new("rpm").expect("a name"),
            available: -5,
            burst: 10,
            amount: 7,
            period: Duration::from_secs(60),
            consumed: 15,
            asked: 2,
            retry_after: Some(Duration::from_secs(60)),
        }
    }

    #[test]
    fn limit_state_round_trips_with_ambiguous_names() {
        let awkward = Subject::new("a, resource b", "b, resource b").unwrap();
        let plain = Subject::new("acme", "gpt-4").unwrap();
        let pools = Across::ALL.map(|across| plain.pooled(across));
        for subject in [plain, awkward].into_iter().chain(pools) {
            let sources = resolve::scopes(&subject).map(Source::Policy);
            for source in sources.into_iter().chain([Source::Defaults, Source::Call]) {
                let state = LimitState::new(&balance(&subject), Some(&source));
                assert_eq!(state.check().unwrap(), (balance(&subject), Some(source)));
            }
            assert_eq!(LimitState::new(&balance(&subject), None).check().unwrap().1, None);
        }
    }

    #[test]
    fn invalid_limit_state_names_field() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let state = LimitState::new(&balance(&subject), None);
        let named = LimitState { limit: "r m".to_owned(), ..state.clone() };
        assert_eq!(named.check().unwrap_err().field, "limit");
        let moved = LimitState { source: Some("entity other".to_owned()), ..state };
        assert_eq!(
            moved.check().unwrap_err().to_string(),
            "invalid field `source` in the server's response: `entity other` is not a source of acme on gpt-4"
        );
    }

    #[test]
    fn behaviour_includes_sources() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let explanation = Explanation {
            would: Forecast::Grant,
            retry_after: None,
            limits: Vec::new(),
            on_unavailable: OnUnavailable::LocalShare(0.5),
            on_unavailable_source: "entity acme".to_owned(),
            on_expiry: OnExpiry::Return,
            on_expiry_source: "defaults".to_owned(),
            version: 3,
        };
        let share = policy::OnUnavailable::LocalShare(policy::Share::new(0.5).unwrap());
        let entity = Source::Policy(policy::Scope::Entity(subject.entity.clone()));
        let wanted = ((share, entity), (policy::OnExpiry::Return, Source::Defaults));
        assert_eq!(explanation.behaviour(&subject).unwrap(), wanted);
        let bad = Explanation { on_unavailable: OnUnavailable::LocalShare(f64::NAN), ..explanation };
        assert_eq!(bad.behaviour(&subject).unwrap_err().field, "on_unavailable");
    }
}
