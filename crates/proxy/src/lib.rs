//! A proxy in front of LLM APIs, for callers in any language that change only their base URL, and a mock of
//! those APIs.
//!
//! `request → tenant's limits → throttle of the upstream → upstream → usage → settle`. A [`Proxy`] holds a
//! throttle for each upstream, key and group of models. Instead of a 429, callers wait until the upstream
//! accepts their request. A caller that sends a tidegate token is a tenant: its limits are drawn before the
//! call, and settled with the usage that the upstream reports. [`Profiles`] describe how each provider counts.
//!
//! ```
//! use tidegate_proxy::{Profiles, Proxy, Upstream};
//!
//! let profiles = Profiles::built_in();
//! let openai = Upstream::parse("openai=https://api.openai.com", &profiles)?;
//! assert_eq!((openai.name(), openai.profile().name()), ("openai", "openai"));
//! let proxy = Proxy::builder().upstream(openai)?.build()?;
//! # let _: Proxy = proxy;
//! # Ok::<(), tidegate_proxy::InvalidProxy>(())
//! ```

mod body;
mod builder;
mod call;
mod codec;
mod config;
mod estimate;
mod headers;
mod json_scan;
mod listener;
mod mock;
mod multipart;
mod payload;
mod profile;
mod proxy;
mod refusal;
mod scope;
mod tenant;
mod ticket;
mod transport;
mod usage;

pub use builder::{InvalidProxy, ProxyBuilder, Upstream};
pub use config::InvalidProfiles;
pub use listener::{HttpService, ListenBounds, serve};
pub use mock::{InvalidMock, Mock, MockOptions};
pub use profile::{Format, Group, Profile, Profiles, QuotaHeaders, Reserve};
pub use proxy::{Proxy, ProxyBounds};
pub use scope::ScopeView;
pub use tenant::Tenants;
