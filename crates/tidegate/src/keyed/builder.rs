//! The builder of a registry: the limits of each key, and the options for all keys.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::authority::Authority;
use tidegate_core::random::Random;
use tokio::sync::Notify;

use super::Keyed;
use super::events::{KeyLabel, KeyedListener, KeyedNotice, KeyedSinks};
use super::limits::Limits;
use super::options::{InvalidKeyedOptions, KeyedOptions};
use super::registry::Registry;
use super::rules::Rule;
use crate::builder::fresh_random;
use crate::clock::{Clock, TokioClock};
use crate::events::Sinks;
use crate::meter::KeyedMeter;
use crate::observe::Observer;
use crate::throttle::{Setup, Throttle};
use crate::wait_counters::WaitCounters;

/// Configures the limits of each key. Created by [`Keyed::builder`] and [`Keyed::hosts`].
#[must_use = "a builder does nothing until it is built"]
pub struct KeyedBuilder<K> {
    limits: Limits,
    by: Option<Rule<K>>,
    overflow: Option<Limits>,
    options: KeyedOptions,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Random>,
    listener: Option<KeyedListener<K>>,
    label: Option<KeyLabel<K>>,
    name: String,
    pub(crate) is_measured: bool,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// A builder where every key has its own instance of these limits. [`limits_by`](KeyedBuilder::limits_by)
    /// sets different limits per key.
    pub fn builder(limits: Limits) -> KeyedBuilder<K> {
        KeyedBuilder {
            limits,
            by: None,
            overflow: None,
            options: KeyedOptions::default(),
            clock: None,
            random: None,
            listener: None,
            label: None,
            name: String::new(),
            is_measured: false,
        }
    }
}

impl Keyed<Authority> {
    /// A builder with the limits of [`Throttle::host`] for every host.
    ///
    /// ```
    /// use tidegate::{Authority, Cost, Keyed, Outcome};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let hosts = Keyed::hosts().build()?;
    /// let host = Authority::new("https://Example.com/page?q=1")?;
    /// let permit = hosts.acquire(&host, Cost::request()).await?;
    /// // ... the call ...
    /// permit.settle(Outcome::success());
    /// # Ok(())
    /// # }
    /// ```
    #[expect(clippy::missing_panics_doc, reason = "a test checks the draft for hosts")]
    pub fn hosts() -> KeyedBuilder<Authority> {
        let limits = Throttle::host().limits().expect("the draft for hosts is within its bounds");
        Self::builder(limits).labelled(Authority::to_string)
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> KeyedBuilder<K> {
    /// Sets limits by key.
    ///
    /// The function is called when a key is first used, outside all locks, and should be quick. Keys that get
    /// clones of the same [`Limits`] share their memory.
    ///
    /// ```
    /// use tidegate::{Keyed, Rate, Throttle};
    ///
    /// let free = Throttle::builder().rate(Rate::per_minute(10)).limits()?;
    /// let paid = Throttle::builder().rate(Rate::per_minute(600)).limits()?;
    /// let users: Keyed<String> = Keyed::builder(free.clone())
    ///     .limits_by(move |user: &String| if user.starts_with("paid-") { paid.clone() } else { free.clone() })
    ///     .build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn limits_by(mut self, by: impl Fn(&K) -> Limits + Send + Sync + 'static) -> Self {
        self.by = Some(Arc::new(by));
        self
    }

    /// Sets the limits of the overflow throttle, which new keys share while the registry is full. By default
    /// these are the limits given to [`Keyed::builder`] without their circuit and without pauses by hints.
    /// They apply to all such keys together.
    pub fn overflow(mut self, limits: Limits) -> Self {
        self.overflow = Some(limits);
        self
    }

    /// Sets all options at once.
    pub fn options(mut self, options: KeyedOptions) -> Self {
        self.options = options;
        self
    }

    /// Whether the limits apply; without them every request is admitted and counted. See
    /// [`Keyed::set_enabled`].
    pub fn enabled(mut self, is_enabled: bool) -> Self {
        self.options.enabled = is_enabled;
        self
    }

    /// The maximum number of keys: 100,000 by default.
    ///
    /// At the maximum, a new key evicts one whose state carries no information: it holds back no caller, and
    /// nothing was learned. If there is none, the new key shares the [overflow](Self::overflow) throttle with
    /// others, and an event reports it.
    pub fn keys_max(mut self, keys: usize) -> Self {
        self.options.keys_max = keys;
        self
    }

    /// How long a key must be unused before it is evicted with everything learned of it: three minutes, which
    /// is also the minimum. A key that holds back a caller is never evicted.
    pub fn idle_ttl(mut self, span: Duration) -> Self {
        self.options.idle_ttl = span;
        self
    }

    /// The number of shards, each with its own lock: 16 by default, and a power of two.
    pub fn shards(mut self, shards: usize) -> Self {
        self.options.shards = shards;
        self
    }

    /// A wait longer than this counts as throttled in [`KeyedSnapshot`](crate::KeyedSnapshot): 10 ms by
    /// default.
    pub fn throttled_after(mut self, span: Duration) -> Self {
        self.options.throttled_after = span;
        self
    }

    /// A clock other than tokio's.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sets the random source for jitter and spread, instead of a fresh seed. Each key has its own stream.
    pub fn random(mut self, random: Random) -> Self {
        self.random = Some(random);
        self
    }

    /// Registers a listener for the events of all keys, called as
    /// [`Builder::on_state_change`](crate::Builder::on_state_change) describes: in order, outside all locks,
    /// one at a time.
    pub fn on_event(mut self, listener: impl Fn(&KeyedNotice<K>) + Send + Sync + 'static) -> Self {
        self.listener = Some(Box::new(listener));
        self
    }

    /// The name of the keys as a group in traces and metrics. See [the guide](crate::guide::observability).
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the name of each key in traces; without it keys have none. The function is called outside all
    /// locks, and only for subscribers. Keys are never labels of metrics.
    pub fn labelled(mut self, label: impl Fn(&K) -> String + Send + Sync + 'static) -> Self {
        self.label = Some(Box::new(label));
        self
    }

    /// Checks every number and creates the registry.
    ///
    /// # Errors
    /// [`InvalidKeyedOptions`] lists every option that is out of its bounds, with field, value and bound.
    #[expect(clippy::missing_panics_doc, reason = "limits without their circuit are within the bounds")]
    pub fn build(self) -> Result<Keyed<K>, InvalidKeyedOptions> {
        self.options.check()?;
        let sinks = Arc::new(KeyedSinks::new(self.listener, self.label));
        let setup = Setup {
            clock: self.clock.unwrap_or_else(|| Arc::new(TokioClock::new())),
            sinks: Sinks::of(Arc::clone(&sinks) as _),
            counters: Some(WaitCounters::new(self.options.throttled_after)),
            drained: Notify::new(),
            observer: Observer::new(&self.name, self.is_measured),
        };
        let random = self.random.unwrap_or_else(fresh_random);
        // One of the hosts that share it must not stop the others, neither by failing nor by a `Retry-After`.
        let shared = || {
            self.limits.edited(|draft| {
                draft.circuit = None;
                draft.pause = draft.pause.max(Duration::ZERO);
            })
        };
        let overflow =
            self.overflow.unwrap_or_else(|| shared().expect("a circuit less is within the bounds"));
        let limits = self.limits;
        let by = self.by.unwrap_or_else(|| Arc::new(move |_| limits.clone()));
        let meter = KeyedMeter::new(&self.name, self.is_measured);
        let registry = Registry::new(by, &overflow, self.options, Arc::new(setup), sinks, meter, random);
        Ok(Keyed { registry })
    }
}

impl<K> fmt::Debug for KeyedBuilder<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedBuilder")
            .field("limits", &self.limits)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
