//! Encodes a batch of calls as the array parameters of one statement, and decodes the replies from its result
//! arrays.

use std::collections::BTreeMap;

use deadpool_postgres::Client;
use foldhash::HashSet;
use tidegate_core::limit::cascade::Line;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::call::{Call, Job, Kind, QueuedCall, Status, StepReply, hash};
use super::sql::{PARAMETERS, Sql};
use crate::buckets::{Reading, Readings};
use crate::error::StoreError;
use crate::tables::{self, MeterRow, column, shape_columns};

/// The most limits of a subject, including those that callers supplied.
pub(super) const ROWS_MAX: i32 = 64;
/// The most limits that are known to exist; the set is cleared beyond it.
const KNOWN_MAX: usize = 1 << 18;

/// The calls of a batch in columns, borrowed from their jobs.
#[derive(Default)]
pub(super) struct Batch<'a> {
    limits: Limits<'a>,
    calls: Calls<'a>,
    lines: Lines<'a>,
    units: Vec<Option<i64>>,
}

/// Distinct limits, by key.
#[derive(Default)]
struct Limits<'a> {
    entity: Vec<&'a str>,
    resource: Vec<&'a str>,
    line: Vec<&'a str>,
    limit: Vec<&'a str>,
    new: Vec<i32>,
    shape: [Vec<i64>; 3],
    version: Vec<i64>,
}

#[derive(Default)]
struct Calls<'a> {
    kind: Vec<i16>,
    lease: Vec<Vec<u8>>,
    step: Vec<i64>,
    line: Vec<i32>,
    lines: Vec<i32>,
    name: Vec<i32>,
    names: Vec<i32>,
    version: Vec<i64>,
    span: Vec<i64>,
    expiry: Vec<i16>,
    watched: Vec<bool>,
    digest: Vec<i64>,
    key: Vec<i64>,
    levels: Vec<Option<&'a str>>,
    held: Vec<Option<String>>,
}

#[derive(Default)]
struct Lines<'a> {
    meter: Vec<i32>,
    name: Vec<i32>,
    own: Vec<bool>,
    shape: [Vec<i64>; 3],
    debt_max: Vec<Option<i64>>,
    /// The level and limit of each line.
    of: Vec<(usize, &'a Line)>,
}

/// The key of a limit: entity, resource and row.
type Key<'a> = (&'a str, &'a str, &'a str);

impl<'a> Batch<'a> {
    /// Encodes the calls of these jobs. Limits that are not `known` to exist are created if needed.
    pub(super) fn new(jobs: &'a [Job], known: &HashSet<u64>) -> Self {
        let mut batch = Self::default();
        let mut limits: BTreeMap<Key<'a>, (&'a Rule, i64)> = BTreeMap::new();
        for job in jobs {
            let version = column(job.call.call.levels.version().number());
            for (key, _, line) in affected_lines(&job.call.call) {
                limits.entry(key).or_insert((&line.rule, version));
            }
        }
        let places: BTreeMap<Key<'a>, i32> = limits.keys().copied().zip(1..).collect();
        for ((key, (rule, version)), place) in limits.into_iter().zip(1..) {
            batch.limits.push(key, rule, version);
            if !known.contains(&number_of(key)) {
                batch.limits.new.push(place);
            }
        }
        for job in jobs {
            batch.push(job, &places);
        }
        batch
    }

    fn push(&mut self, job: &'a Job, places: &BTreeMap<Key<'a>, i32>) {
        let QueuedCall { call, text } = &job.call;
        let (calls, first) = (&mut self.calls, self.lines.meter.len());
        calls.line.push(place(first));
        for (key, level, line) in affected_lines(call) {
            self.lines.meter.push(places[&key]);
            self.lines.name.push(place(line.name + 1));
            self.lines.own.push(level == 0);
            for (columns, number) in self.lines.shape.iter_mut().zip(shape_columns(line.rule.shape())) {
                columns.push(number);
            }
            self.lines.debt_max.push(line.debt_max.map(column));
            self.lines.of.push((level, line));
        }
        calls.lines.push(place(self.lines.meter.len() - first));
        calls.name.push(place(self.units.len()));
        calls.names.push(place(call.numbers.len()));
        self.units.extend(&call.numbers);
        calls.kind.push(call.kind as i16);
        calls.lease.push(call.lease.number().to_be_bytes().to_vec());
        calls.step.push(i64::from(call.step));
        calls.version.push(column(call.levels.version().number()));
        calls.span.push(call.span);
        calls.expiry.push(i16::from(call.on_expiry == OnExpiry::Return));
        calls.watched.push(call.is_watched);
        calls.digest.push(call.digest.cast_signed());
        calls.key.push(text.key);
        let is_kept = call.kind == Kind::Draw;
        calls.levels.push(is_kept.then_some(&text.levels));
        calls.held.push(is_kept.then(|| held(&call.numbers)));
    }

    /// The number of limits that are not known to exist.
    pub(super) const fn unknown(&self) -> usize {
        self.limits.new.len()
    }

    /// Sends the batch. `None` if a limit that was known to exist does not.
    pub(super) async fn send(
        &self,
        client: &Client,
        sql: &Sql,
        (namespace, wall): (i64, Option<i64>),
    ) -> Result<Option<Row>, tokio_postgres::Error> {
        let statement = client.prepare_cached(&sql.steps).await?;
        let row = client.query_one(&statement, &self.parameters(&namespace, &wall)).await?;
        let is_missing: bool = row.try_get(0)?;
        Ok((!is_missing).then_some(row))
    }

    fn parameters<'b>(
        &'b self,
        namespace: &'b i64,
        wall: &'b (dyn ToSql + Sync),
    ) -> [&'b (dyn ToSql + Sync); PARAMETERS] {
        let Self { limits: m, calls: c, lines: l, units } = self;
        let ([m_amount, m_period, m_burst], [l_amount, l_period, l_burst]) = (&m.shape, &l.shape);
        [
            namespace,
            wall,
            &ROWS_MAX,
            &m.entity,
            &m.resource,
            &m.line,
            &m.limit,
            &m.new,
            m_amount,
            m_period,
            m_burst,
            &m.version,
            &c.kind,
            &c.lease,
            &c.step,
            &c.line,
            &c.lines,
            &c.name,
            &c.names,
            &c.version,
            &c.span,
            &c.expiry,
            &c.watched,
            &c.digest,
            &c.key,
            &c.levels,
            &c.held,
            &l.meter,
            &l.name,
            &l.own,
            l_amount,
            l_period,
            l_burst,
            &l.debt_max,
            units,
        ]
    }

    /// The reply to each of the jobs.
    pub(super) fn answers(&self, jobs: &[Job], row: &Row) -> Vec<Result<StepReply, StoreError>> {
        match ReplyColumns::read(row) {
            Ok(answers) => (0..jobs.len()).map(|call| self.answer(&answers, call)).collect(),
            Err(error) => {
                let what = format!("unexpected reply of the function `steps`: {error}");
                jobs.iter().map(|_| Err(StoreError::Corrupt { what: what.clone() })).collect()
            }
        }
    }

    fn answer(&self, answers: &ReplyColumns<'_>, number: usize) -> Result<StepReply, StoreError> {
        let extra = answers.extra[number].unwrap_or_default();
        let status = match answers.status[number] {
            0 => Status::Done,
            1 => Status::Refused,
            2 => Status::Ended(tables::ending(extra)?),
            3 => Status::Late { done: u32::try_from(extra).unwrap_or(u32::MAX) },
            4 => Status::NoLease,
            5 => Status::OtherLevels(answers.levels[number].unwrap_or_default().to_owned()),
            6 => Status::Full,
            other => return Err(StoreError::Corrupt { what: format!("unknown status {other} of a step") }),
        };
        let first = usize::try_from(self.calls.line[number]).unwrap_or_default();
        let count = usize::try_from(self.calls.lines[number]).unwrap_or_default();
        let readings = (first..first + count).filter_map(|line| self.reading(answers, line).transpose());
        let readings: Readings = readings.collect::<Result<_, _>>()?;
        let at = Stamp::from_micros(tables::number(answers.at[number], "a time")?);
        Ok(StepReply { status, at, is_repeat: answers.repeat[number], extra, readings })
    }

    fn reading(&self, answers: &ReplyColumns<'_>, line: usize) -> Result<Option<Reading>, StoreError> {
        let Some(moved) = answers.moved[line] else { return Ok(None) };
        let read = |columns: &[Option<i64>]| columns[line].unwrap_or_default();
        let shape = [read(&answers.amount), read(&answers.period), read(&answers.burst)];
        let (level, drawn_line) = self.lines.of[line];
        let row = MeterRow {
            row: drawn_line.rule.row(),
            shape,
            full_at: read(&answers.full),
            part: read(&answers.part),
            version: read(&answers.version),
            consumed: read(&answers.consumed),
        };
        let meter = if shape == shape_columns(drawn_line.rule.shape()) {
            row.of_rule(&drawn_line.rule)?
        } else {
            row.meter()?
        };
        Ok(Some(Reading::new(level, drawn_line, moved, &meter)))
    }

    /// Marks limits as known that a granted draw has created or found.
    pub(super) fn mark_known(&self, answers: &[Result<StepReply, StoreError>], known: &mut HashSet<u64>) {
        if known.len() > KNOWN_MAX {
            known.clear();
        }
        if self.limits.new.is_empty() {
            return;
        }
        for (call, answer) in answers.iter().enumerate() {
            let is_there = |answer: &StepReply| matches!(answer.status, Status::Done) && !answer.is_repeat;
            if !answer.as_ref().is_ok_and(is_there) || self.calls.kind[call] > 1 {
                continue;
            }
            let first = usize::try_from(self.calls.line[call]).unwrap_or_default();
            let count = usize::try_from(self.calls.lines[call]).unwrap_or_default();
            known.extend(
                self.lines.meter[first..first + count].iter().map(|meter| self.limits.number(*meter)),
            );
        }
    }

    /// Removes the limits of this batch from the known ones.
    pub(super) fn unmark_known(&self, known: &mut HashSet<u64>) {
        for meter in 1..=place(self.limits.entity.len()) {
            known.remove(&self.limits.number(meter));
        }
    }
}

impl<'a> Limits<'a> {
    fn push(&mut self, (entity, resource, line): Key<'a>, rule: &'a Rule, version: i64) {
        self.entity.push(entity);
        self.resource.push(resource);
        self.line.push(line);
        self.limit.push(rule.name().as_str());
        for (columns, number) in self.shape.iter_mut().zip(shape_columns(rule.shape())) {
            columns.push(number);
        }
        self.version.push(version);
    }

    fn number(&self, meter: i32) -> u64 {
        let at = usize::try_from(meter - 1).unwrap_or_default();
        number_of((self.entity[at], self.resource[at], self.line[at]))
    }
}

/// The result of the function, in columns.
struct ReplyColumns<'a> {
    status: Vec<i16>,
    at: Vec<i64>,
    repeat: Vec<bool>,
    extra: Vec<Option<i64>>,
    levels: Vec<Option<&'a str>>,
    moved: Vec<Option<i64>>,
    amount: Vec<Option<i64>>,
    period: Vec<Option<i64>>,
    burst: Vec<Option<i64>>,
    full: Vec<Option<i64>>,
    part: Vec<Option<i64>>,
    version: Vec<Option<i64>>,
    consumed: Vec<Option<i64>>,
}

impl<'a> ReplyColumns<'a> {
    fn read(row: &'a Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            status: row.try_get("o_status")?,
            at: row.try_get("o_at")?,
            repeat: row.try_get("o_repeat")?,
            extra: row.try_get("o_extra")?,
            levels: row.try_get("o_levels")?,
            moved: row.try_get("o_moved")?,
            amount: row.try_get("o_amount")?,
            period: row.try_get("o_period")?,
            burst: row.try_get("o_burst")?,
            full: row.try_get("o_full")?,
            part: row.try_get("o_part")?,
            version: row.try_get("o_version")?,
            consumed: row.try_get("o_consumed")?,
        })
    }
}

/// The lines that a call affects: for draws and spends the requested ones, else all, because the server knows
/// what the lease holds.
fn affected_lines(call: &Call) -> impl Iterator<Item = (Key<'_>, usize, &Line)> {
    let takes = matches!(call.kind, Kind::Draw | Kind::Spend | Kind::Repair);
    call.levels.levels().iter().enumerate().flat_map(move |(number, level)| {
        let lines = level.limits.iter().filter(move |line| !takes || call.numbers[line.name].is_some());
        let (entity, resource) = (level.subject.entity.as_str(), level.subject.resource.as_str());
        lines.map(move |line| ((entity, resource, line.rule.row()), number, line))
    })
}

fn number_of((entity, resource, line): Key<'_>) -> u64 {
    hash(&[entity.as_bytes(), b"#", resource.as_bytes(), b"#", line.as_bytes()])
}

/// Units in PostgreSQL's array syntax: `{12,NULL,500}`.
fn held(numbers: &[Option<i64>]) -> String {
    let units =
        numbers.iter().map(|units| units.map_or_else(|| "NULL".to_owned(), |units| units.to_string()));
    format!("{{{}}}", units.collect::<Vec<_>>().join(","))
}

fn place(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Decodes the id of a lease.
pub(super) fn lease_id(bytes: &[u8]) -> Option<LeaseId> {
    let number = <[u8; 16]>::try_from(bytes).ok()?;
    Some(LeaseId::from_number(u128::from_be_bytes(number)))
}
