//! Tenants: callers with a token of tidegate, whose limits are drawn before a call and settled with its usage.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tidegate::store::{HostWall, WallClock};
use tidegate::{EntityId, Lease, LimitError, LimitLine, Limited, Limiter, ResourceName, SettleStatus};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{Token, TokenScope, TokenState};
use tidegate_server::{LogThrottle, PeerCertificate, Secret, TokenCache};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::headers::Key;
use crate::refusal::Refusal;

/// Renewals of a lease within its time: two may fail.
const RENEWALS: u32 = 3;

/// The store may be unavailable for every call.
static FAILURES: LogThrottle = LogThrottle::new();

/// Names of limits that are drawn if the tenant has them, and the unit of each. Those of requests come first.
const ALIASES: [(&str, Unit); 8] = [
    ("rpm", Unit::Request),
    ("rph", Unit::Request),
    ("rpd", Unit::Request),
    ("tpm", Unit::Tokens),
    ("tph", Unit::Tokens),
    ("tpd", Unit::Tokens),
    ("itpm", Unit::Input),
    ("otpm", Unit::Output),
];

/// How many of them count requests.
const REQUEST_ALIASES: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Unit {
    Request,
    Tokens,
    Input,
    Output,
}

/// The tenants of a store.
#[derive(Clone)]
pub struct Tenants {
    limiter: Limiter,
    tokens: Arc<dyn TokenCache>,
    namespace: Namespace,
    clock: Arc<dyn WallClock>,
}

/// The tokens of a call, as they are drawn or settled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallTokens {
    pub(crate) input: u64,
    pub(crate) output: u64,
}

/// The limits that a call holds. They are renewed until it ends.
#[derive(Debug)]
pub(crate) struct TenantLease {
    lease: Arc<Mutex<Lease>>,
    renewals: JoinHandle<()>,
    /// Whether it holds limits of tokens, and not of requests only.
    has_tokens: bool,
}

/// How a call may draw its limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrawTimes {
    /// How long it may wait for them.
    pub(crate) within: Duration,
    /// How long they stay drawn without a renewal.
    pub(crate) lease_time: Duration,
}

impl CallTokens {
    const fn units(self, unit: Unit) -> u64 {
        match unit {
            Unit::Request => 1,
            Unit::Tokens => self.input.saturating_add(self.output),
            Unit::Input => self.input,
            Unit::Output => self.output,
        }
    }

    /// The same tokens with less output, so that the limits can grant them at once or later. `None` if they cannot
    /// without any output.
    fn fitting(self, limited: &Limited) -> Option<Self> {
        let without_output = Self { output: 0, ..self };
        let space = limited.lines.iter().filter_map(|LimitLine { balance, .. }| {
            let name = balance.limit.as_str();
            let output_units = self.units_of(name)?.checked_sub(without_output.units_of(name)?)?;
            (output_units > 0).then(|| balance.burst.checked_sub(without_output.units_of(name)?))
        });
        let output = space.min()??;
        (output < self.output).then_some(Self { output, ..self })
    }

    /// The units of a limit of this name.
    fn units_of(self, name: &str) -> Option<u64> {
        let mut recorded = self.recorded(false).into_iter();
        let aliases = || ALIASES.iter().find(|(alias, _)| *alias == name).map(|(_, unit)| self.units(*unit));
        recorded.find(|(recorded, _)| *recorded == name).map(|(_, units)| units).or_else(aliases)
    }

    /// The units of names that are always recorded, requests first.
    fn recorded(self, is_estimated: bool) -> [(&'static str, u64); 5] {
        [
            ("requests", 1),
            ("tokens", self.units(Unit::Tokens)),
            ("input_tokens", self.input),
            ("output_tokens", self.output),
            ("estimated", u64::from(is_estimated)),
        ]
    }
}

impl Tenants {
    /// The tenants whose tokens and limits are in this namespace of the limiter's store.
    pub fn new(limiter: Limiter, tokens: Arc<dyn TokenCache>, namespace: Namespace) -> Self {
        Self { limiter, tokens, namespace, clock: Arc::new(HostWall) }
    }

    /// The entity of a caller's token, if that is valid and has the scope. Without a key it is the token that the
    /// client certificate maps to.
    pub(crate) async fn identify(
        &self,
        key: Option<&Key>,
        peer: Option<&PeerCertificate>,
        scope: TokenScope,
    ) -> Result<EntityId, Refusal> {
        let unknown = || Refusal::unauthorized("the token is unknown, expired or revoked");
        let stored = match (key, peer.and_then(PeerCertificate::token)) {
            (Some(key), _) => {
                let secret: Secret = key.as_str().parse().map_err(|_| unknown())?;
                let stored = self.tokens.get(secret.id()).await.map_err(LimitError::Store)?;
                stored.filter(|stored| stored.matches(&secret))
            }
            (None, Some(token)) => self.tokens.get(token).await.map_err(LimitError::Store)?,
            (None, None) => return Err(Refusal::unauthorized("this needs a token of tidegate")),
        };
        let stored = stored.ok_or_else(unknown)?;
        let token = &stored.token;
        if token.state(self.clock.now()) != TokenState::Good || token.namespace != self.namespace {
            return Err(unknown());
        }
        if !token.scopes.has(scope) {
            return Err(Refusal::forbidden(format!("the token `{}` lacks the scope `{scope}`", token.id)));
        }
        entity_of(token)
    }

    /// Draws the limits of a tenant. Without `tokens` the call can use none, and only requests are drawn and
    /// recorded. Until it is settled, it counts as an estimate: it is booked as that if the proxy is killed.
    ///
    /// The output is an estimate, which makes no call impossible: if it exceeds the capacity of a limit, the call
    /// draws what the limit can grant.
    pub(crate) async fn draw(
        &self,
        entity: &EntityId,
        model: &str,
        tokens: Option<CallTokens>,
        times: DrawTimes,
    ) -> Result<TenantLease, Refusal> {
        let drawn = self.try_draw(entity, model, tokens, times).await;
        let fitting = match (&drawn, tokens) {
            (Err(LimitError::TooLarge(limited)), Some(tokens)) => tokens.fitting(limited),
            _ => None,
        };
        match fitting {
            // No time has passed: a request above the capacity does not wait.
            Some(tokens) => Ok(self.try_draw(entity, model, Some(tokens), times).await?),
            None => Ok(drawn?),
        }
    }

    async fn try_draw(
        &self,
        entity: &EntityId,
        model: &str,
        tokens: Option<CallTokens>,
        times: DrawTimes,
    ) -> Result<TenantLease, LimitError> {
        let resource = ResourceName::new(model)?;
        let has_tokens = tokens.is_some();
        let tokens = tokens.unwrap_or_default();
        let cost = tokens.recorded(true);
        let aliases = ALIASES.map(|(name, unit)| (name, tokens.units(unit)));
        let (cost, aliases) =
            if has_tokens { (&cost[..], &aliases[..]) } else { (&cost[..1], &aliases[..REQUEST_ALIASES]) };
        let request =
            self.limiter.request((entity.as_str(), resource.as_str()), cost).if_limited(aliases).recorded();
        let DrawTimes { within, lease_time } = times;
        let lease = Arc::new(Mutex::new(request.deadline(lease_time).acquire_within(within).await?));
        let renewals = tokio::spawn(renew(Arc::clone(&lease), lease_time));
        Ok(TenantLease { lease, renewals, has_tokens })
    }
}

/// The entity that a token draws for: the one it is bound to, else the one with the token's id.
fn entity_of(token: &Token) -> Result<EntityId, Refusal> {
    match &token.entity {
        Some(entity) => Ok(entity.clone()),
        None => EntityId::new(token.id.as_str()).map_err(|error| Refusal::forbidden(error.to_string())),
    }
}

/// Renews a lease until the task is aborted.
async fn renew(lease: Arc<Mutex<Lease>>, lease_time: Duration) {
    loop {
        sleep(lease_time / RENEWALS).await;
        if let Err(error) = lease.lock().await.renew(lease_time).await
            && let Some(left_out) = FAILURES.allow()
        {
            tracing::warn!(%error, left_out, "the limits of a call cannot be renewed");
        }
    }
}

impl TenantLease {
    /// Books what the call used. `is_estimated` if the upstream did not report all of it.
    pub(crate) fn settle(self, tokens: CallTokens, is_estimated: bool) {
        let (lease, recorded) = (Arc::clone(&self.lease), tokens.recorded(is_estimated));
        let (recorded, aliases) = if self.has_tokens {
            (recorded.to_vec(), &ALIASES[..])
        } else {
            (recorded[..1].to_vec(), &ALIASES[..REQUEST_ALIASES])
        };
        end(async move {
            let mut lease = lease.lock().await;
            let held = aliases.iter().filter(|(name, _)| lease.held(name).is_some());
            let held = held.map(|(name, unit)| (*name, tokens.units(*unit)));
            let units: Vec<(&str, u64)> = recorded.into_iter().chain(held).collect();
            lease.settle(&units).await
        });
    }

    /// Returns everything: the call used nothing.
    pub(crate) fn cancel(self) {
        let lease = Arc::clone(&self.lease);
        end(async move { lease.lock().await.cancel().await });
    }
}

/// Completes an ending in the background, unless the store is in this process and responds at once.
fn end(ending: impl Future<Output = Result<SettleStatus, LimitError>> + Send + 'static) {
    let mut ending = Box::pin(async move {
        if let Err(error) = ending.await
            && let Some(left_out) = FAILURES.allow()
        {
            tracing::warn!(%error, left_out, "a call cannot be booked");
        }
    });
    // Outside a runtime the limiter's settler completes it.
    if ending.as_mut().now_or_never().is_none()
        && let Ok(runtime) = Handle::try_current()
    {
        runtime.spawn(ending);
    }
}

impl Drop for TenantLease {
    fn drop(&mut self) {
        self.renewals.abort();
    }
}

impl fmt::Debug for Tenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenants").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}
