//! The compared strategies: ours as shipped, peers, and the oracle.

use tidegate_core::plan::{Auto, Controller, Draft};

use crate::client::{Client, GatesClient};
use crate::peers::{AwsAdaptive, Backoff, Gentlify, Netflix, Oracle};
use crate::scenario::Scenario;

/// A way to decide when requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// The default: [`Auto`](tidegate_core::plan::Auto).
    Auto,
    /// `Throttle::host()`.
    Host,
    /// `Throttle::gentle()`.
    Gentle,
    /// 16 workers with exponential backoff.
    Backoff16,
    /// 64 workers with exponential backoff.
    Backoff64,
    /// The adaptive mode of AWS's SDKs.
    Aws,
    /// Netflix's Vegas limit.
    Vegas,
    /// Netflix's Gradient2 limit.
    Gradient2,
    /// gentlify's published rule.
    Gentlify,
    /// Knows the limit.
    Oracle,
}

impl Strategy {
    /// All strategies, ours first.
    pub const ALL: [Self; 10] = [
        Self::Auto,
        Self::Host,
        Self::Gentle,
        Self::Backoff16,
        Self::Backoff64,
        Self::Aws,
        Self::Vegas,
        Self::Gradient2,
        Self::Gentlify,
        Self::Oracle,
    ];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Gentle => "gentle",
            Self::Backoff16 => "backoff16",
            Self::Backoff64 => "backoff64",
            Self::Aws => "aws-adaptive",
            Self::Vegas => "vegas",
            Self::Gradient2 => "gradient2",
            Self::Gentlify => "gentlify",
            Self::Oracle => "oracle",
        }
    }

    /// Whether it is a peer: neither ours nor the oracle.
    pub const fn is_peer(self) -> bool {
        !matches!(self, Self::Auto | Self::Host | Self::Gentle | Self::Oracle)
    }

    /// The strategy of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == name)
    }

    pub(crate) fn client(self, scenario: &Scenario, seed: u64) -> Box<dyn Client> {
        let gated = |draft| -> Box<dyn Client> {
            let has_tokens = scenario.tokens.is_some() || scenario.token_quota.is_some();
            Box::new(GatesClient::new(draft, has_tokens, seed))
        };
        match self {
            Self::Auto => gated(Draft { controller: Controller::Auto(Auto::default()), ..Draft::default() }),
            Self::Host => gated(Draft::host()),
            Self::Gentle => gated(Draft::gentle()),
            Self::Backoff16 => Box::new(Backoff::new(16, seed)),
            Self::Backoff64 => Box::new(Backoff::new(64, seed)),
            Self::Aws => Box::new(AwsAdaptive::new()),
            Self::Vegas => Box::new(Netflix::vegas(seed)),
            Self::Gradient2 => Box::new(Netflix::gradient2(seed)),
            Self::Gentlify => Box::new(Gentlify::new(seed)),
            Self::Oracle => Box::new(Oracle::new(scenario)),
        }
    }
}
