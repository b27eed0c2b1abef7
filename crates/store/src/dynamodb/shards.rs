//! Which shards of a stream are to be read, and from where: decided here, without asking anybody.
//!
//! A stream is shards. One is closed after some hours, or when it is divided, and its children go on; whoever wants changes of
//! an item in their order reads a parent to its end before its children. A shard is gone a day after it was closed.

use std::collections::BTreeMap;

use crate::aggregate::Since;

/// A shard as the engine lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) id: String,
    pub(super) parent: Option<String>,
    pub(super) is_closed: bool,
}

/// A place in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Oldest,
    Newest,
    /// Behind the record of this number.
    After(String),
}

/// What is to be asked of a shard next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ask {
    /// An iterator, at this place.
    Iterator(Place),
    /// Records, by this iterator.
    Records(String),
}

/// What is known of a stream's shards.
#[derive(Debug, Default)]
pub(super) struct Shards {
    is_listed: bool,
    known: BTreeMap<String, Shard>,
}

#[derive(Debug)]
struct Shard {
    parent: Option<String>,
    state: State,
    /// The number of the last record that was read.
    last: Option<String>,
    /// The last time it was read, nothing came.
    is_quiet: bool,
    /// A record was read that is younger than the run that reads it.
    is_past: bool,
}

#[derive(Debug)]
enum State {
    At(Place),
    Reading(String),
    Done,
}

impl Shards {
    /// Takes in all shards as they are listed. Of the first listing those that are open are read from where it is said; those
    /// that come later are read whole, for they go on with what was read before.
    pub(super) fn learn(&mut self, listed: &[Listed], since: Since) {
        let is_first = !self.is_listed;
        self.known.retain(|id, _| listed.iter().any(|shard| shard.id == *id));
        for shard in listed {
            // The children of a closed shard continue it. A shard without children is read even if it looks closed: dynoxide
            // lists the last record of an open shard as its ending, and the first response of a closed one ends it anyway.
            let has_ended =
                || shard.is_closed && listed.iter().any(|other| other.parent.as_ref() == Some(&shard.id));
            let state = match (is_first, since) {
                (true, Since::Now) if has_ended() => State::Done,
                (true, Since::Now) => State::At(Place::Newest),
                _ => State::At(Place::Oldest),
            };
            let new =
                Shard { parent: shard.parent.clone(), state, last: None, is_quiet: false, is_past: false };
            self.known.entry(shard.id.clone()).or_insert(new);
        }
        self.is_listed = true;
    }

    /// What is to be asked now: of each shard that is not read to its end, and whose parent is.
    pub(super) fn asks(&self) -> Vec<(String, Ask)> {
        let mut asks = Vec::new();
        for (id, shard) in &self.known {
            let parent = shard.parent.as_ref().and_then(|parent| self.known.get(parent));
            if parent.is_some_and(|parent| !matches!(parent.state, State::Done)) {
                continue;
            }
            match &shard.state {
                State::At(place) => asks.push((id.clone(), Ask::Iterator(place.clone()))),
                State::Reading(iterator) => asks.push((id.clone(), Ask::Records(iterator.clone()))),
                State::Done => {}
            }
        }
        asks
    }

    /// An iterator was given.
    pub(super) fn began(&mut self, id: &str, iterator: Option<String>) {
        if let Some(shard) = self.known.get_mut(id) {
            shard.state = iterator.map_or(State::Done, State::Reading);
        }
    }

    /// So many records were read, the last of them of this number; without a further iterator there are no more to come.
    /// Answers whether the shard is at its end now.
    pub(super) fn read(&mut self, id: &str, last: Option<String>, next: Option<String>) -> bool {
        let Some(shard) = self.known.get_mut(id) else { return false };
        shard.is_quiet = last.is_none();
        if last.is_some() {
            shard.last = last;
        }
        let is_end = next.is_none();
        shard.state = next.map_or(State::Done, State::Reading);
        is_end
    }

    /// Its iterator is too old. Answers whether records may have been missed.
    pub(super) fn expired(&mut self, id: &str) -> bool {
        let Some(shard) = self.known.get_mut(id) else { return false };
        shard.is_quiet = false;
        let place = shard.last.clone().map_or(Place::Newest, Place::After);
        let is_missed = place == Place::Newest;
        shard.state = State::At(place);
        is_missed
    }

    /// What was to be read next is gone: a day has passed.
    pub(super) fn trimmed(&mut self, id: &str) {
        if let Some(shard) = self.known.get_mut(id) {
            (shard.state, shard.last, shard.is_quiet) = (State::At(Place::Oldest), None, false);
        }
    }

    /// The shard itself is gone.
    pub(super) fn gone(&mut self, id: &str) {
        self.known.remove(id);
    }

    /// Whether they were ever listed.
    pub(super) const fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Whether everything that there was had been read when it was last asked for.
    pub(super) fn is_quiet(&self) -> bool {
        let is_quiet = |shard: &Shard| match shard.state {
            State::At(_) => false,
            State::Reading(_) => shard.is_quiet,
            State::Done => true,
        };
        self.is_listed && self.known.values().all(is_quiet)
    }

    /// A record was read that is younger than the run that reads it.
    pub(super) fn passed(&mut self, id: &str) {
        if let Some(shard) = self.known.get_mut(id) {
            shard.is_past = true;
        }
    }

    /// Whether everything has been read that there was when it was begun to read. Where records come all the time it is never
    /// quiet.
    pub(super) fn is_past_start(&self) -> bool {
        let is_past = |shard: &Shard| match shard.state {
            State::At(_) => shard.is_past,
            State::Reading(_) => shard.is_quiet || shard.is_past,
            State::Done => true,
        };
        self.is_listed && self.known.values().all(is_past)
    }

    /// Whether there is nothing left that could tell of more: the stream was ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_listed && self.known.values().all(|shard| matches!(shard.state, State::Done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(rows: &[(&str, Option<&str>, bool)]) -> Vec<Listed> {
        let row = |(id, parent, is_closed): &(&str, Option<&str>, bool)| Listed {
            id: (*id).to_owned(),
            parent: parent.map(str::to_owned),
            is_closed: *is_closed,
        };
        rows.iter().map(row).collect()
    }

    fn asked(shards: &Shards) -> Vec<String> {
        let word = |(id, ask): (String, Ask)| match ask {
            Ask::Iterator(place) => format!("{id} {place:?}"),
            Ask::Records(iterator) => format!("{id} {iterator}"),
        };
        shards.asks().into_iter().map(word).collect()
    }

    #[test]
    fn a_parent_is_read_to_its_end_before_its_children() {
        let mut shards = Shards::default();
        let split = listed(&[("a", None, true), ("b", Some("a"), false), ("c", Some("a"), false)]);
        shards.learn(&split, Since::Oldest);
        assert_eq!(asked(&shards), ["a Oldest"]);
        shards.began("a", Some("i1".to_owned()));
        assert!(!shards.read("a", Some("7".to_owned()), Some("i2".to_owned())));
        assert_eq!(asked(&shards), ["a i2"]);
        assert!(shards.read("a", None, None), "a closed shard ends");
        assert_eq!(asked(&shards), ["b Oldest", "c Oldest"]);
        assert!(!shards.is_quiet() && !shards.is_over());
    }

    #[test]
    fn from_now_on_is_the_end_of_open_shards_and_the_whole_of_those_that_follow() {
        let mut shards = Shards::default();
        shards.learn(&listed(&[("a", None, true), ("b", Some("a"), false)]), Since::Now);
        assert_eq!(asked(&shards), ["b Newest"]);
        shards.began("b", Some("i1".to_owned()));
        shards.read("b", None, Some("i2".to_owned()));
        assert!(shards.is_quiet());
        // It is divided: what was written to the children before they were listed is read too.
        shards.learn(&listed(&[("b", None, true), ("c", Some("b"), false)]), Since::Now);
        assert_eq!(asked(&shards), ["b i2"]);
        shards.read("b", None, None);
        assert_eq!(asked(&shards), ["c Oldest"]);
    }

    #[test]
    fn closed_shard_without_children_is_asked() {
        let mut shards = Shards::default();
        shards.learn(&listed(&[("a", None, true)]), Since::Now);
        assert_eq!(asked(&shards), ["a Newest"]);
        shards.began("a", Some("i1".to_owned()));
        shards.read("a", None, None);
        assert!(asked(&shards).is_empty() && shards.is_over());
    }

    #[test]
    fn a_shard_whose_parent_is_gone_is_read_and_one_that_is_gone_is_forgotten() {
        let mut shards = Shards::default();
        shards.learn(&listed(&[("b", Some("a"), false)]), Since::Oldest);
        assert_eq!(asked(&shards), ["b Oldest"]);
        shards.learn(&[], Since::Oldest);
        assert!(asked(&shards).is_empty() && shards.is_over());
    }

    #[test]
    fn an_iterator_that_is_too_old_goes_on_behind_the_last_record() {
        let mut shards = Shards::default();
        shards.learn(&listed(&[("a", None, false)]), Since::Now);
        shards.began("a", Some("i1".to_owned()));
        assert!(shards.expired("a"), "nothing was read yet: what came meanwhile is not known");
        assert_eq!(asked(&shards), ["a Newest"]);
        shards.began("a", Some("i2".to_owned()));
        shards.read("a", Some("9".to_owned()), Some("i3".to_owned()));
        shards.read("a", None, Some("i4".to_owned()));
        assert!(!shards.expired("a"));
        assert_eq!(asked(&shards), ["a After(\"9\")"]);
        shards.trimmed("a");
        assert_eq!(asked(&shards), ["a Oldest"]);
        shards.gone("a");
        assert!(asked(&shards).is_empty());
    }
}
