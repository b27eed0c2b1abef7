//! Limits as they are: balances, and what would happen.

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::policy;
use tidegate_core::limit::resolve::{self, Source};

use crate::amounts::Cost;
use crate::answer::InvalidAnswer;
use crate::policy::{OnExpiry, OnUnavailable, Version};
use crate::seconds::Seconds;
use crate::text::{EntityId, LimitText, ResourceName};

wire! {
    /// One limit of one subject, as it is.
    #[serde(deny_unknown_fields)]
    pub struct LimitState {
        /// Whose.
        pub entity: EntityId,
        /// Of what.
        pub resource: ResourceName,
        /// The limit's name.
        pub limit: String,
        /// Where it is written: `system`, `resource gpt-4`, `entity acme`, `entity acme, resource gpt-4`, `defaults` or
        /// `this call`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub source: Option<String>,
        /// Whole units there; below zero is debt.
        pub available: i64,
        /// What a full bucket holds.
        pub burst: u64,
        /// Units per period.
        pub amount: u64,
        /// The period.
        pub period: Seconds,
        /// Taken less given back, since it was first used.
        pub consumed: i64,
        /// What was asked of it.
        pub asked: u64,
        /// How long until that can be had: 0 is now, and without it never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
    }

    /// The limits of a subject and of those above it.
    #[serde(deny_unknown_fields)]
    pub struct Balances {
        /// The limits, the subject's own first.
        pub limits: Vec<LimitState>,
    }

    /// How much of a resource's limits is in use, over all buckets.
    #[serde(deny_unknown_fields)]
    pub struct Capacities {
        /// One for each limit name, by name.
        pub limits: Vec<Capacity>,
    }

    /// How much of one limit is in use, over all buckets of a resource.
    #[serde(deny_unknown_fields)]
    pub struct Capacity {
        /// The limit's name.
        pub limit: String,
        /// Buckets that have the limit.
        pub buckets: u64,
        /// The sum of their bursts.
        pub burst: u64,
        /// What is available; debts count below zero.
        pub available: i64,
        /// Taken less returned, since they were first used.
        pub consumed: i64,
    }

    /// Asks what would happen.
    #[serde(deny_unknown_fields)]
    pub struct Ask {
        /// Who would ask.
        pub entity: EntityId,
        /// For what.
        pub resource: ResourceName,
        /// How much of each limit; at least one above 0.
        pub cost: Cost,
        /// Limits of this call, in the place of the subject's own of the same names.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
    }

    /// What would happen, and why: nothing was taken.
    #[serde(deny_unknown_fields)]
    pub struct Explanation {
        /// What would happen.
        pub would: Would,
        /// How long until it can be had, where it would have to wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
        /// Every limit that would be asked, or could be, the subject's own first.
        pub limits: Vec<LimitState>,
        /// What happens when the store is away.
        pub on_unavailable: OnUnavailable,
        /// Where that is written.
        pub on_unavailable_source: String,
        /// What becomes of leases that are never ended.
        pub on_expiry: OnExpiry,
        /// Where that is written.
        pub on_expiry_source: String,
        /// The count of administrative changes that this is as of.
        pub version: Version,
    }

    /// What would happen.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum Would {
        /// It would be granted.
        Grant,
        /// It would have to wait.
        Wait,
        /// It can never be had.
        Never,
    }
}

query! {
    /// Whose balances.
    #[serde(deny_unknown_fields)]
    pub struct BalanceQuery {
        /// Whose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Of what; without it, of everything the entity and those it draws from have used.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
    }
}

query! {
    /// Of which resource.
    #[serde(deny_unknown_fields)]
    pub struct CapacityQuery {
        /// Of what.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
    }
}

impl Capacity {
    /// The limit's name.
    ///
    /// # Errors
    /// [`InvalidAnswer`] for a name that cannot be.
    pub fn name(&self) -> Result<LimitName, InvalidAnswer> {
        LimitName::new(&self.limit).map_err(InvalidAnswer::of("limit"))
    }
}

impl LimitState {
    /// A limit's state, and where the limit is written if that is known.
    pub fn new(balance: &Balance, source: Option<&Source>) -> Self {
        Self {
            entity: balance.subject.entity.clone().into(),
            resource: balance.subject.resource.clone().into(),
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

    /// The state as a limiter has it, and where the limit is written if that was said.
    ///
    /// # Errors
    /// [`InvalidAnswer`] for a name that cannot be, and for a source that is none of this subject's.
    pub fn check(self) -> Result<(Balance, Option<Source>), InvalidAnswer> {
        let subject = Subject { entity: self.entity.0, resource: self.resource.0 };
        let source = self.source.map(|text| source(&text, &subject)).transpose()?;
        let balance = Balance {
            limit: LimitName::new(&self.limit).map_err(InvalidAnswer::of("limit"))?,
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
    /// What happens to this subject when the store is away, what becomes of its leases that are never ended, and who says
    /// so.
    ///
    /// # Errors
    /// [`InvalidAnswer`] for a share that cannot be, and for a source that is none of this subject's.
    pub fn behaviour(&self, subject: &Subject) -> Result<Behaviour, InvalidAnswer> {
        let on_unavailable = self.on_unavailable.try_into().map_err(InvalidAnswer::of("on_unavailable"))?;
        Ok((
            (on_unavailable, source(&self.on_unavailable_source, subject)?),
            (self.on_expiry.into(), source(&self.on_expiry_source, subject)?),
        ))
    }
}

/// How a subject behaves when the store is away, and how its leases end by themselves, each with who says so.
pub type Behaviour = ((policy::OnUnavailable, Source), (policy::OnExpiry, Source));

/// Reads where a limit of this subject is written. By itself the text may mean several scopes: a name may hold all of it.
fn source(text: &str, subject: &Subject) -> Result<Source, InvalidAnswer> {
    let scopes = resolve::scopes(subject).map(Source::Policy);
    let known = scopes.into_iter().chain([Source::Defaults, Source::Call]);
    let invalid = || InvalidAnswer { field: "source", why: format!("`{text}` is none of {subject}") };
    known.into_iter().find(|source| source.to_string() == text).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
    fn the_state_of_a_limit_is_read_back_as_it_was_written_whatever_its_names_hold() {
        let awkward = Subject::new("a, resource b", "b, resource b").unwrap();
        for subject in [Subject::new("acme", "gpt-4").unwrap(), awkward] {
            let sources = resolve::scopes(&subject).map(Source::Policy);
            for source in sources.into_iter().chain([Source::Defaults, Source::Call]) {
                let state = LimitState::new(&balance(&subject), Some(&source));
                assert_eq!(state.check().unwrap(), (balance(&subject), Some(source)));
            }
            assert_eq!(LimitState::new(&balance(&subject), None).check().unwrap().1, None);
        }
    }

    #[test]
    fn a_state_that_cannot_be_is_refused_with_its_field() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let state = LimitState::new(&balance(&subject), None);
        let named = LimitState { limit: "r m".to_owned(), ..state.clone() };
        assert_eq!(named.check().unwrap_err().field, "limit");
        let moved = LimitState { source: Some("entity other".to_owned()), ..state };
        assert_eq!(
            moved.check().unwrap_err().to_string(),
            "the server's answer has a field `source` that cannot be: `entity other` is none of acme on gpt-4"
        );
    }

    #[test]
    fn how_a_subject_behaves_is_read_with_who_says_so() {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let explanation = Explanation {
            would: Would::Grant,
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
