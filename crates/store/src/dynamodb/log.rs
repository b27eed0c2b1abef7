//! What administrators change, with its entries of the audit, in one transaction.
//!
//! Whoever changes something reads the namespace's version and what he needs, works out the change, and has it made if the
//! version is still the same. Every change raises the version, so that what was read has not changed either; whoever came
//! second begins anew.

use std::future::Future;

use tidegate_core::limit::audit::{Change, Entry, Filed};
use tidegate_core::limit::policy::{Policy, Scope, Version};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::expression::Write;
use super::keys::{Item, PK, padded, scope_order};
use super::ledger::PRUNED;
use super::lifecycle::enrolled;
use super::link::Action;
use super::trouble::Failed;
use super::view::{number_of, text_of};
use crate::codec;
use crate::error::StoreError;
use crate::policies::check_actor;
use crate::tables::WrittenPolicy;

/// How often a change is worked out anew because others were faster.
const TRIES: usize = 64;
/// Items that the engine writes in one transaction.
const ACTIONS_MAX: usize = 100;
/// The schema that this program writes.
pub(super) const SCHEMA: u64 = 1;

/// Changes that are to be made together.
pub(super) struct Log {
    pub(super) actor: String,
    /// When they are made.
    pub(super) at: Stamp,
    pub(super) seen: Version,
    /// The version they are made at.
    pub(super) version: Version,
    is_first: bool,
    /// The number of the next entry.
    next: u64,
    actions: Vec<Action>,
}

impl Log {
    pub(super) fn push(&mut self, action: Action) {
        self.actions.push(action);
    }

    pub(super) fn note(&mut self, store: &DynamoDb, filed: &Filed, change: &Change) {
        let keys = &store.inner.keys;
        let mut write = Write::new(keys.audit(filed, self.next));
        write.set("version", self.version.number());
        write.set("at", self.at.as_micros());
        write.set("actor", self.actor.as_str());
        write.set("change", codec::change_to_text(change));
        write.set("number", self.next);
        write.set("GSI2PK", keys.all("AUDITS"));
        write.set("GSI2SK", padded(self.next));
        self.push(Action::Update(write));
        self.next += 1;
    }

    pub(super) fn write_policy(
        &mut self,
        store: &DynamoDb,
        scope: &Scope,
        before: Option<Policy>,
        after: Option<Policy>,
    ) {
        let keys = &store.inner.keys;
        let mut write = Write::new(keys.policy(scope));
        if let Some(policy) = &after {
            write.set("version", self.version.number());
            write.set("body", codec::policy_to_text(policy));
            write.set("GSI2PK", keys.all("CONFIGS"));
            write.set("GSI2SK", scope_order(scope));
            if let Scope::Subject(subject) = scope {
                write.set("GSI3PK", keys.custom(&subject.resource));
                write.set("GSI3SK", subject.entity.as_str());
            }
            self.push(Action::Update(write));
        } else {
            self.push(Action::Delete(write));
        }
        self.note(store, &Filed::scope(scope), &Change::Policy { scope: scope.clone(), before, after });
    }
}

/// How a change is worked out.
pub(super) trait Plan: Sync {
    /// What whoever makes it is told.
    type Answer: Send;

    /// What is to be done, given what is there: nothing of it has been done yet.
    fn plan(
        &self,
        store: &DynamoDb,
        log: Log,
    ) -> impl Future<Output = Result<Planned<Self::Answer>, StoreError>> + Send;
}

/// What is to be done about a change.
pub(super) enum Planned<T> {
    Change(Log, T),
    Nothing(T),
}

impl DynamoDb {
    /// What is to be changed is begun: the version is read.
    async fn begin(&self, actor: &str) -> Result<Log, StoreError> {
        let found = self.inner.link.get(&self.inner.keys.version()).await?;
        let (version, next) = match &found {
            Some(item) => (number_of(item, "version")?, number_of(item, "audited")?),
            None => (0, 0),
        };
        let seen = Version::new(version);
        Ok(Log {
            actor: actor.to_owned(),
            at: self.now(),
            seen,
            version: seen.next(),
            is_first: found.is_none(),
            next,
            actions: Vec::new(),
        })
    }

    /// Makes the changes. Answers whether nobody was faster.
    async fn commit(&self, log: Log) -> Result<bool, StoreError> {
        let mut write = Write::new(self.inner.keys.version());
        if log.is_first {
            write.only_without(PK);
            enrolled(&mut write, &self.inner.keys);
            write.set(PRUNED, 0_u64);
        } else {
            write.only_if("version", "=", log.seen.number());
        }
        write.set("version", log.version.number());
        write.set("audited", log.next);
        let mut actions = log.actions;
        actions.push(Action::Update(write));
        if actions.len() > ACTIONS_MAX {
            let what = format!(
                "a change of {} items at once, more than {ACTIONS_MAX}: make several of it",
                actions.len()
            );
            return Err(StoreError::Invalid { what });
        }
        let token = self.epoch();
        let mut patience = self.inner.link.patience();
        loop {
            match self.inner.link.transact_as(Some(&token), &actions).await {
                Ok(()) => return Ok(true),
                Err(Failed::Condition(_)) => return Ok(false),
                Err(failed) => patience.bear(failed).await?,
            }
        }
    }

    /// Works a change out until nobody was faster.
    pub(super) async fn change<P: Plan>(&self, actor: &str, plan: &P) -> Result<P::Answer, StoreError> {
        check_actor(actor)?;
        for _ in 0..TRIES {
            match plan.plan(self, self.begin(actor).await?).await? {
                Planned::Nothing(answer) => return Ok(answer),
                Planned::Change(log, answer) => {
                    if self.commit(log).await? {
                        return Ok(answer);
                    }
                }
            }
        }
        Err(StoreError::unavailable(format!("others changed something {TRIES} times meanwhile")))
    }

    /// The count of changes.
    pub(super) async fn newest_version(&self) -> Result<Version, StoreError> {
        let found = self.inner.link.get(&self.inner.keys.version()).await?;
        found.map_or(Ok(Version::ZERO), |item| Ok(Version::new(number_of(&item, "version")?)))
    }
}

pub(super) fn read_policy(item: &Item) -> Result<WrittenPolicy, StoreError> {
    crate::tables::written_policy(number_of(item, "version")?, text_of(item, "body")?)
}

pub(super) fn read_entry(item: &Item) -> Result<(u64, Entry), StoreError> {
    let (change, filed) = codec::change_from_text(text_of(item, "change")?)?;
    let entry = Entry {
        version: Version::new(number_of(item, "version")?),
        at: Stamp::from_micros(number_of(item, "at")?),
        actor: text_of(item, "actor")?.to_owned(),
        filed,
        change,
    };
    Ok((number_of(item, "number")?, entry))
}
