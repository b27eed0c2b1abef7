//! The upstreams of permits that the configuration of `serve` declares, each with bounds for Auto.

use std::collections::BTreeMap;

use tidegate::{Auto, InvalidPlan, Limits, ResourceName, Slots, Throttle};

use crate::config::{AutoTable, SlotsTable, UpstreamTable};
use crate::failure::Failure;

/// The most upstreams of a file; each has a throttle of its own.
const UPSTREAMS_MAX: usize = 10_000;

/// Checks the names and the bounds.
pub(crate) fn decide(
    file: Option<BTreeMap<String, UpstreamTable>>,
) -> Result<Option<BTreeMap<ResourceName, Limits>>, Failure> {
    let wrong = |why: String| Failure::usage(why).next("see its keys: tidegate serve --help");
    let Some(file) = file else { return Ok(None) };
    if file.len() > UPSTREAMS_MAX {
        let what = format!("`upstreams` has {} tables, and must have at most {UPSTREAMS_MAX}", file.len());
        return Err(wrong(what));
    }
    let check = |(name, table): (String, UpstreamTable)| {
        let parsed = ResourceName::new(&name).map_err(|error| wrong(format!("`upstreams`: {error}")))?;
        let limits = table.limits().map_err(|error| wrong(format!("`upstreams.{name}`: {error}")))?;
        Ok((parsed, limits))
    };
    file.into_iter().map(check).collect::<Result<_, _>>().map(Some)
}

impl UpstreamTable {
    /// The limits of a host, within these bounds.
    fn limits(&self) -> Result<Limits, InvalidPlan> {
        let AutoTable { rate_min, rate_start, rate_max } = self.auto;
        let auto = rate_min.into_iter().fold(Auto::default(), Auto::rate_min);
        let auto = rate_max.into_iter().fold(auto, Auto::rate_max);
        let auto = rate_start.into_iter().fold(auto, Auto::rate_start);
        let SlotsTable { min, start, max } = self.slots;
        let (min, max) = (min.unwrap_or(1), max.unwrap_or(1_024));
        let slots = Slots::adaptive(min..=max).start(start.unwrap_or_else(|| 32.min(max).max(min)));
        Throttle::host().slots(slots).auto_within(auto).limits()
    }
}
