//! What is on the screen, before anything draws it: state, changed by what is heard and by keys. `now` is an argument.

use std::time::Duration;

use tidegate::{EntityId, Stamp, Subject};
use tidegate_client::Event;

use super::rates::Rates;
use super::subjects::{Level, Retry, Row, SUBJECTS_MAX, Sort, Subjects};
use crate::words::shown;

/// How far back the curves go, at most: no terminal is as wide.
const SECONDS_MAX: usize = 600;
/// A filter has at most so many letters.
const FILTER_MAX: usize = 64;
/// One page of the table, for keys.
const PAGE: isize = 10;

/// What is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A server, which tells decisions as they are made.
    Server,
    /// A store, of which only the levels are seen.
    Store,
}

/// What a source tells.
#[derive(Debug, Clone)]
pub(crate) enum Update {
    /// It is there.
    Up,
    /// It is away, and is asked again.
    Lost { why: String },
    /// What a server has counted.
    Totals(Totals),
    /// How the store is.
    Store(Health),
    /// A server that is there does not say what it has counted, and is asked again.
    Silent { why: String },
    /// Something happened to a server.
    Event(Event),
    /// So many events were told that this program does not know.
    Unknown { count: u64 },
    /// The limits of one subject.
    Levels { subject: Subject, levels: Vec<Level> },
    /// What a look at a store found, and whether there is more than was looked at.
    Looked { subjects: Vec<(Subject, Vec<Level>)>, has_more: bool },
    /// Whether there is more of the entity that is looked at than is told.
    More { has_more: bool },
}

/// What a server has counted since it was started.
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

/// How a store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    Good { engine: String, version: u64, took: Duration },
    Away { why: String },
}

/// Whether the source is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Link {
    Connecting,
    Up { since: Stamp },
    Lost { since: Stamp, why: String, tries: u32 },
}

/// A key, whatever the terminal calls it.
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

/// What a key means to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    On,
    Quit,
    /// The shell has the terminal until it lets us go on.
    Suspend,
}

/// Where keys go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Table,
    Filter,
    Help,
}

/// What was heard so far.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// Decisions by second, or units where only a store is seen.
    pub(crate) decided: Rates,
    pub(crate) refused: Rates,
    pub(crate) totals: Option<Totals>,
    pub(crate) subjects: Subjects,
    pub(crate) health: Option<Health>,
    /// Events that were not told, because there were too many.
    pub(crate) missed: u64,
    /// The connection was lost, and what was told meanwhile was not heard.
    pub(crate) has_gaps: bool,
    /// There is more in the store than is looked at.
    pub(crate) has_more: bool,
    /// The last event that is none of a subject, in words.
    pub(crate) news: Option<(Stamp, String)>,
    looked: Option<Stamp>,
    /// The last look was answered: nothing newer is known than what it has counted.
    is_answered: bool,
    /// When the newest server that was seen was started.
    up_since: Option<Stamp>,
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) kind: Kind,
    /// Where it is, as it may stand on a terminal.
    pub(crate) place: String,
    /// The only one that is looked at, as it may stand there.
    pub(crate) entity: Option<String>,
    pub(crate) link: Link,
    pub(crate) mode: Mode,
    pub(crate) sort: Sort,
    pub(crate) filter: String,
    live: Seen,
    /// What was seen when it was paused, and when that was.
    frozen: Option<Box<(Seen, Stamp)>>,
    selected: Option<Subject>,
}

impl Model {
    /// Nothing was heard yet.
    pub(crate) fn new(kind: Kind, place: &str) -> Self {
        let live = Seen {
            decided: Rates::new(SECONDS_MAX),
            refused: Rates::new(SECONDS_MAX),
            totals: None,
            subjects: Subjects::new(SUBJECTS_MAX),
            health: None,
            missed: 0,
            has_gaps: false,
            has_more: false,
            news: None,
            looked: None,
            is_answered: false,
            up_since: None,
        };
        Self {
            kind,
            place: shown(place),
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

    /// Only one is looked at.
    pub(crate) fn only(mut self, entity: Option<&EntityId>) -> Self {
        self.entity = entity.map(|entity| shown(entity.as_str()));
        self
    }

    /// Takes in what a source tells. A pause holds nothing up: it is only not shown.
    pub(crate) fn apply(&mut self, update: Update, now: Stamp) {
        match update {
            Update::Up => {
                if !matches!(self.link, Link::Up { .. }) {
                    self.link = Link::Up { since: now };
                }
            }
            Update::Lost { why } => {
                self.live.is_answered = false;
                self.live.has_gaps |= self.kind == Kind::Server && matches!(self.link, Link::Up { .. });
                self.link = match self.link {
                    Link::Lost { since, tries, .. } => {
                        Link::Lost { since, why: shown(&why), tries: tries.saturating_add(1) }
                    }
                    _ => Link::Lost { since: now, why: shown(&why), tries: 1 },
                };
            }
            Update::Totals(totals) => self.live.count(totals, now),
            Update::Store(Health::Away { why }) => self.live.health = Some(Health::Away { why: shown(&why) }),
            Update::Store(health) => self.live.health = Some(health),
            Update::Silent { why } => {
                self.live.is_answered = false;
                self.live.news = Some((now, shown(&format!("the server does not answer: {why}"))));
            }
            Update::Event(event) => self.live.hear(&event, now),
            Update::Unknown { count } => {
                self.live.has_gaps = true;
                self.live.news = Some((now, format!("{count} events of a newer server are not known here")));
            }
            Update::More { has_more } => self.live.has_more = has_more,
            Update::Levels { subject, levels } => {
                self.live.subjects.looked(&subject, levels);
            }
            Update::Looked { subjects, has_more } => self.live.look(subjects, has_more, now),
        }
    }

    /// Does what a key says.
    pub(crate) fn key(&mut self, key: Key, now: Stamp) -> Flow {
        match (self.mode, key) {
            (Mode::Table, Key::Escape) if !self.filter.is_empty() => self.filter.clear(),
            (_, Key::Interrupt) | (Mode::Table, Key::Letter('q') | Key::Escape) => return Flow::Quit,
            (_, Key::Suspend) => return Flow::Suspend,
            (Mode::Help, _) => self.mode = Mode::Table,
            (Mode::Filter, key) => self.edit(key),
            (Mode::Table, Key::Letter('?')) => self.mode = Mode::Help,
            (Mode::Table, Key::Letter('/')) => self.mode = Mode::Filter,
            (Mode::Table, Key::Letter('s')) => self.sort = self.sort.next(),
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
        Flow::On
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

    /// What is shown: what was heard so far, or until it was paused.
    pub(crate) fn seen(&self) -> &Seen {
        self.frozen.as_ref().map_or(&self.live, |frozen| &frozen.0)
    }

    /// The time that is shown.
    pub(crate) fn shown_at(&self, now: Stamp) -> Stamp {
        self.frozen.as_ref().map_or(now, |frozen| frozen.1)
    }

    /// Until when everything is counted that the curves show. Between two looks nothing is known: it would be shown as if
    /// nothing happened. One that is lost or silent is shown as nothing.
    pub(crate) fn counted_at(&self, now: Stamp) -> Stamp {
        let (seen, at) = (self.seen(), self.shown_at(now));
        seen.looked.filter(|_| seen.is_answered).unwrap_or(at)
    }

    /// The time of the speeds in the table: a server tells refusals as they are, a store is looked at.
    pub(crate) fn rows_at(&self, now: Stamp) -> Stamp {
        match self.kind {
            Kind::Server => self.shown_at(now),
            Kind::Store => self.counted_at(now),
        }
    }

    /// Since when it is paused.
    pub(crate) fn paused_at(&self) -> Option<Stamp> {
        self.frozen.as_ref().map(|frozen| frozen.1)
    }

    /// The rows that are shown, and which of them is selected.
    pub(crate) fn rows(&self, now: Stamp) -> (Vec<&Row>, Option<usize>) {
        let rows = self.seen().subjects.listed(&self.filter, self.sort, self.rows_at(now));
        let selected =
            self.selected.as_ref().and_then(|subject| rows.iter().position(|row| row.subject == *subject));
        // Without a choice, and where the chosen one is not listed, it is the first.
        let selected = selected.or((!rows.is_empty()).then_some(0));
        (rows, selected)
    }

    /// Whose levels are wanted.
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

impl Seen {
    /// What was counted since the last time. A server that was started anew counts from nothing; one that is older than
    /// another that has answered is a second one at the same address, and what it counted was not counted since.
    fn count(&mut self, totals: Totals, now: Stamp) {
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
            let from = self.looked.unwrap_or(now);
            self.decided.spread(granted.saturating_add(refused), from, now);
            self.refused.spread(refused, from, now);
        }
        self.up_since = self.up_since.max(Some(totals.up_since));
        (self.looked, self.is_answered) = (Some(now), true);
        self.totals = Some(totals);
    }

    fn look(&mut self, subjects: Vec<(Subject, Vec<Level>)>, has_more: bool, now: Stamp) {
        let from = self.looked.unwrap_or(now);
        let mut units = 0_u64;
        for (subject, levels) in subjects {
            let taken = self.subjects.looked(&subject, levels);
            self.subjects.drawn(&subject, taken, from, now);
            units = units.saturating_add(taken);
        }
        self.decided.spread(units, from, now);
        (self.looked, self.is_answered) = (Some(now), true);
        self.has_more = has_more;
    }

    fn hear(&mut self, event: &Event, now: Stamp) {
        let news = match event {
            Event::Refused { entity, resource, of, limit, retry_after } => {
                let subject = Subject { entity: entity.0.clone(), resource: resource.0.clone() };
                let retry = retry_after.map_or(Retry::Never, |span| Retry::At(now + span.as_duration()));
                return self.subjects.refused(&subject, of.0.as_str(), limit, retry, now);
            }
            Event::Lagged { dropped } => {
                self.missed = self.missed.saturating_add(*dropped);
                format!("{dropped} events were missed: there are too many")
            }
            Event::LeasesExpired { settled, returned } => {
                format!("leases past their deadline: {settled} settled, {returned} returned")
            }
            Event::Changed { version, actor } => format!("change {version} by {actor}"),
            Event::StoreAway { span } => {
                format!("the store is away, left alone for {:?}", span.as_duration())
            }
            Event::StoreBack => "the store is back".to_owned(),
            Event::Degraded { entity, resource } => {
                format!("without the store: {} got {}", entity.0, resource.0)
            }
            Event::Unsettled { waiting } => format!("a lease stays spent: {waiting} endings wait"),
            Event::RulesStale { entity, resource } => {
                format!("newer limits are read for {} on {}", entity.0, resource.0)
            }
            Event::QueueFull { waiters_max } => format!("{waiters_max} wait for a limit, as many as may"),
            Event::Busy { requests_max } => format!("{requests_max} requests are under way, as many as may"),
            Event::Stopping => "the server is stopping".to_owned(),
        };
        self.news = Some((now, shown(&news)));
    }
}
