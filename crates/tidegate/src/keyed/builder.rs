//! Building a registry: the limits of each key, and what holds for all of them.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::authority::Authority;
use tidegate_core::random::Random;
use tokio::sync::Notify;

use super::Keyed;
use super::events::{KeyedListener, KeyedNotice, KeyedSinks, Labelled};
use super::limits::Limits;
use super::options::{InvalidKeyedOptions, KeyedOptions};
use super::registry::Registry;
use super::rules::Rule;
use crate::builder::fresh_random;
use crate::clock::{Clock, TokioClock};
use crate::events::Sinks;
use crate::meter::KeyedMeter;
use crate::observe::Observer;
use crate::tally::Tally;
use crate::throttle::{Setup, Throttle};

/// Says what the limits of each key are; made by [`Keyed::builder`] and [`Keyed::hosts`].
#[must_use = "a builder does nothing until it is built"]
pub struct KeyedBuilder<K> {
    limits: Limits,
    by: Option<Rule<K>>,
    overflow: Option<Limits>,
    options: KeyedOptions,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Random>,
    listener: Option<KeyedListener<K>>,
    label: Option<Labelled<K>>,
    name: String,
    pub(crate) is_measured: bool,
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// A builder where every key has these limits, each for itself. [`limits_by`](KeyedBuilder::limits_by) tells keys apart.
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
    #[expect(clippy::missing_panics_doc, reason = "the draft for hosts is checked by a test")]
    pub fn hosts() -> KeyedBuilder<Authority> {
        let limits = Throttle::host().limits().expect("the draft for hosts is within its bounds");
        Self::builder(limits).labelled(Authority::to_string)
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> KeyedBuilder<K> {
    /// Limits by key.
    ///
    /// It is asked when a key is first seen, outside all locks, and should be quick. Keys that get clones of the same
    /// [`Limits`] share their memory.
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

    /// The limits of the one entry that new keys share while there is no space for them: those given to
    /// [`Keyed::builder`] without their circuit and without pauses by hints, unless configured here. They are for all such keys
    /// together.
    pub fn overflow(mut self, limits: Limits) -> Self {
        self.overflow = Some(limits);
        self
    }

    /// Everything that holds for all keys, at once.
    pub fn options(mut self, options: KeyedOptions) -> Self {
        self.options = options;
        self
    }

    /// Whether the limits count; without them everybody is let in, and counted. See [`Keyed::set_enabled`].
    pub fn enabled(mut self, is_enabled: bool) -> Self {
        self.options.enabled = is_enabled;
        self
    }

    /// How many keys are kept: 100,000 unless said otherwise.
    ///
    /// When there are as many, a new one takes the place of one with which nothing would be lost: no limit that holds
    /// somebody back, and nothing learned. Where none is found, it shares the [overflow](Self::overflow) entry with others
    /// like it, and an event tells.
    pub fn keys_max(mut self, keys: usize) -> Self {
        self.options.keys_max = keys;
        self
    }

    /// How long nobody must have asked for a key before it is forgotten with what was learned of it: three minutes, and
    /// no less. What holds somebody back is not forgotten however long that takes.
    pub fn idle_ttl(mut self, span: Duration) -> Self {
        self.options.idle_ttl = span;
        self
    }

    /// In how many parts the keys are kept, each with a lock of its own: 16 unless said otherwise, and a power of two.
    pub fn shards(mut self, shards: usize) -> Self {
        self.options.shards = shards;
        self
    }

    /// A wait longer than this counts as throttled in [`KeyedSnapshot`](crate::KeyedSnapshot): 10 ms unless said otherwise.
    pub fn throttled_after(mut self, span: Duration) -> Self {
        self.options.throttled_after = span;
        self
    }

    /// A clock other than tokio's.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Randomness for jitter and spread other than a fresh seed. Each key has a stream of its own.
    pub fn random(mut self, random: Random) -> Self {
        self.random = Some(random);
        self
    }

    /// Hears of what happens to the keys, as [`Builder::on_state_change`](crate::Builder::on_state_change) does for a
    /// throttle: in order, outside all locks, one at a time.
    pub fn on_event(mut self, listener: impl Fn(&KeyedNotice<K>) + Send + Sync + 'static) -> Self {
        self.listener = Some(Box::new(listener));
        self
    }

    /// What the keys together are called in traces and metrics. See [the guide](crate::guide::observability).
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// What each key is called in traces, where without this none is. It is asked outside all locks, and only when
    /// somebody hears. Keys are never labels of metrics.
    pub fn labelled(mut self, label: impl Fn(&K) -> String + Send + Sync + 'static) -> Self {
        self.label = Some(Box::new(label));
        self
    }

    /// Checks every number and makes the registry.
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
            tally: Some(Tally::new(self.options.throttled_after)),
            drained: Notify::new(),
            observer: Observer::new(&self.name, self.is_measured),
        };
        let random = self.random.unwrap_or_else(fresh_random);
        // One host among those that share it must not stop the others, neither by failing nor by a `Retry-After`.
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
