//! The state of the screen, changed by updates and keys. Pure: `now` is an argument.

use std::time::Duration;

use tidegate::{EntityId, Stamp, Subject};
use tidegate_client::{Event, UpstreamState};

use super::rates::Rates;
use super::subjects::{Level, Retry, Row, SUBJECTS_MAX, Sort, Subjects};
use crate::format;

/// Length of the curves: no terminal is wider.
const SECONDS_MAX: usize = 600;
/// Maximum letters of a filter.
const FILTER_MAX: usize = 64;
/// Rows that a page key moves by.
const PAGE: isize = 10;

/// The kind of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A server, which sends decisions as they are made.
    Server,
    /// A store, which has levels only.
    Store,
}

/// An update from a source.
#[derive(Debug, Clone)]
pub(crate) enum Update {
    /// The source is available.
    Up,
    /// The source is unavailable, and is retried.
    Lost { why: String },
    /// The counters of a server.
    Totals(Totals),
    /// The health of the store.
    Store(Health),
    /// A connected server did not return its counters, and is retried.
    Silent { why: String },
    /// An event of a server.
    Event(Event),
    /// The number of events that this program does not know.
    Unknown { count: u64 },
    /// The limits of one subject.
    Levels { subject: Subject, levels: Vec<Level> },
    /// The result of a scan of a store, and whether there is more.
    Scan { subjects: Vec<(Subject, Vec<Level>)>, has_more: bool },
    /// The subjects of a server with the most grants, and their number.
    Busiest(Vec<(Subject, u64)>),
    /// The upstreams of a server, the busiest first.
    Upstreams(Vec<UpstreamState>),
    /// Whether the watched entity has more subjects than are sent.
    HasMore { has_more: bool },
}

/// The counters of a server since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) up_since: Stamp,
    pub(crate) granted: u64,
    pub(crate) refused: u64,
    pub(crate) degraded: u64,
    pub(crate) unsettled: u64,
    pub(crate) expired: u64,
    pub(crate) open_leases: u64,
    pub(crate) waiting: u64,
    pub(crate) store_away: Option<Duration>,
}

/// The health of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    Good { engine: String, version: u64, took: Duration },
    Away { why: String },
}

/// The state of the connection to the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Link {
    Connecting,
    Up { since: Stamp },
    Lost { since: Stamp, why: String, tries: u32 },
}

/// A key, independent of the terminal library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    Letter(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
}

/// The effect of a key on the event loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Continue,
    Quit,
    /// Suspend, and give the terminal back to the shell.
    Suspend,
}

/// The input mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Table,
    Filter,
    Help,
}

/// The data on the screen.
#[derive(Debug, Clone)]
pub(crate) struct ViewData {
    /// Decisions per second, or units for a store.
    pub(crate) decided: Rates,
    pub(crate) refused: Rates,
    pub(crate) totals: Option<Totals>,
    pub(crate) subjects: Subjects,
    pub(crate) health: Option<Health>,
    /// The busiest upstreams of the server.
    pub(crate) upstreams: Vec<UpstreamState>,
    /// Events that the server dropped, because there were too many.
    pub(crate) missed: u64,
    /// Whether events were lost while the connection was down.
    pub(crate) has_gaps: bool,
    /// Whether the store has more subjects than are read.
    pub(crate) has_more: bool,
    /// The last event that is not about a subject, in words.
    pub(crate) news: Option<(Stamp, String)>,
    polled_at: Option<Stamp>,
    /// Whether the last poll succeeded, so that its counters are the latest data.
    is_current: bool,
    /// Start of the newest server at this address.
    up_since: Option<Stamp>,
}

/// The state of the screen.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) kind: Kind,
    /// The address of the source, escaped for display.
    pub(crate) place: String,
    /// The watched entity, escaped for display; `None` for all.
    pub(crate) entity: Option<String>,
    pub(crate) link: Link,
    pub(crate) mode: Mode,
    pub(crate) sort: Sort,
    pub(crate) filter: String,
    live: ViewData,
    /// The data at the time of the pause, and that time.
    frozen: Option<Box<(ViewData, Stamp)>>,
    selected: Option<Subject>,
}

impl Model {
    /// An empty screen.
    pub(crate) fn new(kind: Kind, place: &str) -> Self {
        let live = ViewData {
            decided: Rates::new(SECONDS_MAX),
            refused: Rates::new(SECONDS_MAX),
            totals: None,
            subjects: Subjects::new(SUBJECTS_MAX),
            health: None,
            upstreams: Vec::new(),
            missed: 0,
            has_gaps: false,
            has_more: false,
            news: None,
            polled_at: None,
            is_current: false,
            up_since: None,
        };
        Self {
            kind,
            place: format::escape(place),
            entity: None,
            link: Link::Connecting,
            mode: Mode::Table,
            sort: Sort::Count,
            filter: String::new(),
            live,
            frozen: None,
            selected: None,
        }
    }

    /// Restricts the display to one entity.
    pub(crate) fn only(mut self, entity: Option<&EntityId>) -> Self {
        self.entity = entity.map(|entity| format::escape(entity.as_str()));
        self
    }

    /// Applies an update. During a pause, the live data is updated too, but not shown.
    pub(crate) fn apply(&mut self, update: Update, now: Stamp) {
        match update {
            Update::Up => {
                if !matches!(self.link, Link::Up { .. }) {
                    self.link = Link::Up { since: now };
                }
            }
            Update::Lost { why } => {
                self.live.is_current = false;
                self.live.has_gaps |= self.kind == Kind::Server && matches!(self.link, Link::Up { .. });
                self.link = match self.link {
                    Link::Lost { since, tries, .. } => {
                        Link::Lost { since, why: format::escape(&why), tries: tries.saturating_add(1) }
                    }
                    _ => Link::Lost { since: now, why: format::escape(&why), tries: 1 },
                };
            }
            Update::Totals(totals) => self.live.on_totals(totals, now),
            Update::Store(Health::Away { why }) => {
                self.live.health = Some(Health::Away { why: format::escape(&why) });
            }
            Update::Store(health) => self.live.health = Some(health),
            Update::Silent { why } => {
                self.live.is_current = false;
                self.live.news = Some((now, format::escape(&format!("the server does not respond: {why}"))));
            }
            Update::Event(event) => self.live.on_event(&event, now),
            Update::Unknown { count } => {
                self.live.has_gaps = true;
                self.live.news = Some((now, format!("{count} unknown events from a newer server")));
            }
            Update::Busiest(busiest) => self.live.subjects.set_granted(&busiest),
            Update::Upstreams(upstreams) => self.live.upstreams = upstreams,
            Update::HasMore { has_more } => self.live.has_more = has_more,
            Update::Levels { subject, levels } => {
                self.live.subjects.set_levels(&subject, levels);
            }
            Update::Scan { subjects, has_more } => self.live.on_scan(subjects, has_more, now),
        }
    }

    /// Handles a key.
    pub(crate) fn key(&mut self, key: Key, now: Stamp) -> Flow {
        match (self.mode, key) {
            (Mode::Table, Key::Escape) if !self.filter.is_empty() => self.filter.clear(),
            (_, Key::Interrupt) | (Mode::Table, Key::Letter('q') | Key::Escape) => return Flow::Quit,
            (_, Key::Suspend) => return Flow::Suspend,
            (Mode::Help, _) => self.mode = Mode::Table,
            (Mode::Filter, key) => self.edit(key),
            (Mode::Table, Key::Letter('?')) => self.mode = Mode::Help,
            (Mode::Table, Key::Letter('/')) => self.mode = Mode::Filter,
            (Mode::Table, Key::Letter('s')) => {
                self.sort = self.sort.next();
                // A store counts no grants.
                if (self.kind, self.sort) == (Kind::Store, Sort::Granted) {
                    self.sort = self.sort.next();
                }
            }
            (Mode::Table, Key::Letter('p' | ' ')) => {
                self.frozen = match self.frozen.take() {
                    None => Some(Box::new((self.live.clone(), now))),
                    Some(_) => None,
                };
            }
            (Mode::Table, Key::Up | Key::Letter('k')) => self.select(-1, now),
            (Mode::Table, Key::Down | Key::Letter('j')) => self.select(1, now),
            (Mode::Table, Key::PageUp) => self.select(-PAGE, now),
            (Mode::Table, Key::PageDown) => self.select(PAGE, now),
            (Mode::Table, Key::Home | Key::Letter('g')) => self.select(isize::MIN, now),
            (Mode::Table, Key::End | Key::Letter('G')) => self.select(isize::MAX, now),
            (Mode::Table, _) => {}
        }
        Flow::Continue
    }

    fn edit(&mut self, key: Key) {
        match key {
            Key::Enter => self.mode = Mode::Table,
            Key::Escape => {
                self.filter.clear();
                self.mode = Mode::Table;
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Letter(letter) if !letter.is_control() && self.filter.chars().count() < FILTER_MAX => {
                self.filter.push(letter);
            }
            _ => {}
        }
    }

    /// The displayed data: live, or as of the pause.
    pub(crate) fn data(&self) -> &ViewData {
        self.frozen.as_ref().map_or(&self.live, |frozen| &frozen.0)
    }

    /// The displayed time.
    pub(crate) fn shown_at(&self, now: Stamp) -> Stamp {
        self.frozen.as_ref().map_or(now, |frozen| frozen.1)
    }

    /// The end of the curves: the time of the last poll. Later time has no data, and would look as if nothing
    /// happened. While the source is lost or silent, the curves drop to zero.
    pub(crate) fn counted_at(&self, now: Stamp) -> Stamp {
        let (data, at) = (self.data(), self.shown_at(now));
        data.polled_at.filter(|_| data.is_current).unwrap_or(at)
    }

    /// The time of the speeds in the table: now for a server, which sends refusals at once; the last scan for
    /// a store.
    pub(crate) fn rows_at(&self, now: Stamp) -> Stamp {
        match self.kind {
            Kind::Server => self.shown_at(now),
            Kind::Store => self.counted_at(now),
        }
    }

    /// The start of the pause.
    pub(crate) fn paused_at(&self) -> Option<Stamp> {
        self.frozen.as_ref().map(|frozen| frozen.1)
    }

    /// The displayed rows, and the index of the selected one.
    pub(crate) fn rows(&self, now: Stamp) -> (Vec<&Row>, Option<usize>) {
        let rows = self.data().subjects.rows(&self.filter, self.sort, self.rows_at(now));
        let selected =
            self.selected.as_ref().and_then(|subject| rows.iter().position(|row| row.subject == *subject));
        // Defaults to the first row, also if the filter hides the selected one.
        let selected = selected.or((!rows.is_empty()).then_some(0));
        (rows, selected)
    }

    /// The subject whose levels are displayed.
    pub(crate) fn wanted(&self, now: Stamp) -> Option<Subject> {
        let (rows, selected) = self.rows(now);
        selected.and_then(|index| rows.get(index)).map(|row| row.subject.clone())
    }

    fn select(&mut self, by: isize, now: Stamp) {
        let (rows, selected) = self.rows(now);
        let index = selected.unwrap_or_default().saturating_add_signed(by).min(rows.len().saturating_sub(1));
        self.selected = rows.get(index).map(|row| row.subject.clone());
    }
}

impl ViewData {
    /// Adds the increase of the counters since the last poll. A newly started server counts from zero. A
    /// server that started before another one at the same address is a second replica behind a load balancer:
    /// its totals are not an increase.
    fn on_totals(&mut self, totals: Totals, now: Stamp) {
        if let Some(before) = self.totals {
            let (granted, refused) = if before.up_since == totals.up_since {
                (before.granted, before.refused)
            } else if self.up_since.is_none_or(|newest| newest < totals.up_since) {
                (0, 0)
            } else {
                (totals.granted, totals.refused)
            };
            let granted = totals.granted.saturating_sub(granted);
            let refused = totals.refused.saturating_sub(refused);
            let from = self.polled_at.unwrap_or(now);
            self.decided.spread(granted.saturating_add(refused), from, now);
            self.refused.spread(refused, from, now);
        }
        self.up_since = self.up_since.max(Some(totals.up_since));
        (self.polled_at, self.is_current) = (Some(now), true);
        self.totals = Some(totals);
    }

    fn on_scan(&mut self, subjects: Vec<(Subject, Vec<Level>)>, has_more: bool, now: Stamp) {
        let from = self.polled_at.unwrap_or(now);
        let mut units = 0_u64;
        for (subject, levels) in subjects {
            let taken = self.subjects.set_levels(&subject, levels);
            self.subjects.add_units(&subject, taken, from, now);
            units = units.saturating_add(taken);
        }
        self.decided.spread(units, from, now);
        (self.polled_at, self.is_current) = (Some(now), true);
        self.has_more = has_more;
    }

    fn on_event(&mut self, event: &Event, now: Stamp) {
        let news = match event {
            Event::Refused { entity, resource, of, limit, retry_after } => {
                let subject = Subject { entity: entity.0.clone(), resource: resource.0.clone() };
                let retry = retry_after.map_or(Retry::Never, |span| Retry::At(now + span.as_duration()));
                return self.subjects.add_refusal(&subject, of.as_ref().map(|of| &of.0), limit, retry, now);
            }
            Event::Lagged { dropped } => {
                self.missed = self.missed.saturating_add(*dropped);
                format!("{dropped} events were missed: there are too many")
            }
            Event::LeasesExpired { settled, returned } => {
                format!("expired leases: {settled} settled, {returned} returned")
            }
            Event::Changed { version, actor } => format!("change {version} by {actor}"),
            Event::StoreAway { span } => {
                format!("the store is unavailable, circuit open for {}", format::duration(span.as_duration()))
            }
            Event::StoreBack => "the store is available again".to_owned(),
            Event::Degraded { entity, resource } => {
                format!("granted without the store: {} on {}", entity.0, resource.0)
            }
            Event::Unsettled { waiting } => {
                format!("a lease is not settled yet: {waiting} settlements are queued")
            }
            Event::DebtBound { entity, resource, limit, debt_max } => {
                let [entity, resource] = [
                    entity.as_ref().map_or("all entities", |entity| entity.0.as_str()),
                    resource.as_ref().map_or("all resources", |resource| resource.0.as_str()),
                ];
                format!("{limit} of {entity} on {resource} is {debt_max} in debt, its bound")
            }
            Event::RulesStale { entity, resource } => {
                format!("limits changed for {} on {}", entity.0, resource.0)
            }
            Event::QueueFull { waiters_max } => {
                format!("the queue is full: {waiters_max} requests wait for a limit")
            }
            Event::Busy { requests_max } => format!("the server is busy: {requests_max} requests in flight"),
            Event::Stopping => "the server is stopping".to_owned(),
        };
        self.news = Some((now, format::escape(&news)));
    }
}
