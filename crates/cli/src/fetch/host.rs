//! A host: what is to be fetched there, what its sites allow, and how it stands.

use std::collections::VecDeque;
use std::time::Duration;

use tidegate::Authority;
use tokio::time::Instant;

use super::address::{Address, Key};
use super::ahead::Ahead;
use super::book::HostId;
use super::rules::Rules;
use super::tally::Tally;

/// Something to ask a host for.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) what: What,
    /// Where it is now.
    pub(crate) at: Address,
    /// Redirects that were followed to there.
    pub(crate) hops: u32,
    /// Attempts since the last of them.
    pub(crate) tries: u32,
    /// Attempts in all.
    pub(crate) attempts: u32,
}

/// What for.
#[derive(Debug)]
pub(crate) enum What {
    Page(Page),
    /// The rules of one of the two sites of a host.
    Rules {
        of: HostId,
        is_https: bool,
    },
}

/// A page.
#[derive(Debug)]
pub(crate) struct Page {
    /// As it was asked for.
    pub(crate) url: Box<str>,
    pub(crate) key: Key,
    pub(crate) file: String,
    /// Whose page it is, wherever it is now.
    pub(crate) host: HostId,
}

/// Where a host stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is nothing to do.
    Idle,
    /// In the round, with something to do.
    Ready,
    /// It has something to do, and waits until then, or for something to end.
    Waits { until: Option<Instant> },
}

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) authority: Authority,
    /// Of its site at `http://`, and of that at `https://`.
    pub(crate) rules: [Rules; 2],
    /// The delay that they ask for, as long as this is held.
    pub(crate) spaced: Option<tidegate::Throttle>,
    /// Before all else: rules.
    pub(crate) urgent: VecDeque<Job>,
    /// Then what was begun: it comes from a redirect, or is tried again.
    pub(crate) begun: VecDeque<Job>,
    /// Then what is new.
    pub(crate) ahead: Ahead,
    pub(crate) in_flight: u32,
    /// What is tried again there in a while.
    pub(crate) later: u32,
    /// Pages of this host that were begun, wherever they are now.
    pub(crate) open: u64,
    pub(crate) turn: Turn,
    /// Changes with each turn, so that a timer knows whether it is still meant.
    pub(crate) ticket: u64,
    pub(crate) tally: Tally,
    /// When the first and the last request began.
    pub(crate) asked: Option<(Instant, Instant)>,
    /// Since when everything fails there.
    pub(crate) failing: Option<Instant>,
    /// Why nothing more is asked of it.
    pub(crate) gave_up: Option<String>,
    /// Pages a second, of late.
    pub(crate) speed: f64,
    /// Pages that had ended when that was last looked at.
    pub(crate) ended_then: u64,
}

impl Host {
    pub(crate) fn new(authority: Authority, ticket: u64) -> Self {
        Self {
            authority,
            rules: [Rules::Unknown, Rules::Unknown],
            spaced: None,
            urgent: VecDeque::new(),
            begun: VecDeque::new(),
            ahead: Ahead::default(),
            in_flight: 0,
            later: 0,
            open: 0,
            turn: Turn::Idle,
            ticket,
            tally: Tally::default(),
            asked: None,
            failing: None,
            gave_up: None,
            speed: 0.0,
            ended_then: 0,
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        !(self.urgent.is_empty() && self.begun.is_empty() && self.ahead.is_empty())
    }

    /// Whether nothing would be lost with it but its rules and counts.
    pub(crate) fn is_idle(&self) -> bool {
        let is_asking = self.rules.iter().any(|rules| matches!(rules, Rules::Asking));
        !self.has_work() && !is_asking && self.in_flight == 0 && self.later == 0 && self.open == 0
    }

    /// Pages that have not ended.
    pub(crate) fn left(&self) -> u64 {
        self.ahead.len() + self.open
    }

    /// For how long nothing has succeeded there.
    pub(crate) fn lost(&self, now: Instant) -> Duration {
        self.failing.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    pub(crate) const fn rules_of(&mut self, is_https: bool) -> &mut Rules {
        let [http, https] = &mut self.rules;
        if is_https { https } else { http }
    }
}
