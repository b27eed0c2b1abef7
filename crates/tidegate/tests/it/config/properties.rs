//! Properties: every valid draft round-trips through every source, and no input makes parsing panic.

use std::time::Duration;

use proptest::option;
use proptest::prelude::*;
use tidegate::config::fields;
use tidegate::{
    Aimd, Backoff, Brake, Budget, Bytes, Circuit, Config, Controller, Draft, InvalidPlan, Jitter,
    KeyedOptions, Named, Oversize, Pace, Pause, Rate, Retry, RetryBudget, SizeRule, Slots, WhenRefused,
};

const COUNT_MAX: u32 = 1 << 30;
const UNITS_MAX: u64 = 1 << 53;
const AGES: Duration = Duration::from_secs(366 * 24 * 3_600);

/// Any number within the bounds, with extra weight on the bounds themselves.
fn count() -> impl Strategy<Value = u32> {
    prop_oneof![Just(1), Just(COUNT_MAX), 1..=COUNT_MAX, 1_u32..100]
}

fn units() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1), Just(UNITS_MAX), 1..=UNITS_MAX]
}

fn any_count() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), any::<u64>()]
}

fn span() -> impl Strategy<Value = Duration> {
    let ages = u64::try_from(AGES.as_nanos()).expect("a year in nanoseconds");
    let nanos = (1..=ages).prop_map(Duration::from_nanos);
    let round = (1_u64..100_000).prop_map(Duration::from_millis);
    prop_oneof![Just(Duration::from_nanos(1)), Just(AGES), nanos, round]
}

fn span_or_zero() -> impl Strategy<Value = Duration> {
    prop_oneof![1 => Just(Duration::ZERO), 4 => span()]
}

fn fraction() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0, Just(0.1 + 0.2), Just(f64::MIN_POSITIVE)]
}

fn any_slots() -> impl Strategy<Value = Slots> {
    [count(), count(), count()].prop_map(|mut numbers| {
        numbers.sort_unstable();
        let [min, start, max] = numbers;
        Slots::adaptive(min..=max).start(start)
    })
}

fn any_pace() -> impl Strategy<Value = Pace> {
    (span_or_zero(), span_or_zero(), fraction())
        .prop_map(|(a, b, jitter)| Pace::every(a.min(b)).slowest(a.max(b)).jitter(jitter))
}

fn any_rate() -> impl Strategy<Value = Rate> {
    (1_u64..=1 << 40, 1_u64..=86_400_000_000_000, 1_u64..1_000)
        .prop_map(|(amount, nanos, burst)| Rate::new(amount, Duration::from_nanos(nanos)).burst(burst))
}

fn any_budget() -> impl Strategy<Value = Budget> {
    let oversize = prop_oneof![Just(Oversize::Refuse), Just(Oversize::Alone)];
    (units(), span(), oversize)
        .prop_map(|(tokens, window, rule)| Budget::tokens(tokens, window).oversize(rule))
}

fn any_named_budget() -> impl Strategy<Value = Budget> {
    let kinds: [fn(u64, Duration) -> Budget; 3] =
        [Budget::tokens, Budget::input_tokens, Budget::output_tokens];
    let oversize = prop_oneof![Just(Oversize::Refuse), Just(Oversize::Alone)];
    (0_usize..3, units(), span(), oversize)
        .prop_map(move |(kind, tokens, window, rule)| kinds[kind](tokens, window).oversize(rule))
}

/// Up to four limits with different names.
fn any_named<L: std::fmt::Debug>(limit: impl Strategy<Value = L>) -> impl Strategy<Value = Vec<Named<L>>> {
    proptest::collection::btree_map("[a-zA-Z0-9_.-]{1,20}", limit, 0..5)
        .prop_map(|all| all.into_iter().map(|(name, limit)| Named::new(name, limit)).collect())
}

fn any_circuit() -> impl Strategy<Value = Circuit> {
    let error_rate = || {
        (f64::MIN_POSITIVE..=1.0, count(), span(), 1_u32..=1_024).prop_map(
            |(rate, samples, window, slices)| Circuit::at_error_rate(rate, samples, window).slices(slices),
        )
    };
    let trips = prop_oneof![
        count().prop_map(Circuit::after_failures),
        error_rate(),
        (error_rate(), count()).prop_map(|(circuit, failures)| circuit.or_after_failures(failures)),
    ];
    (trips, span_or_zero(), count()).prop_map(|(trips, open, probes)| trips.open_for(open).probes(probes))
}

fn any_pause() -> impl Strategy<Value = Pause> {
    let sizes = (any_count(), span_or_zero(), span_or_zero());
    (span_or_zero(), span_or_zero(), option::of(sizes)).prop_map(|(max, tail, sizes)| {
        let pause = Pause::default().max(max).tail(tail);
        sizes.map_or(pause, |(small_max, small, large)| pause.sizes(SizeRule::new(small_max, small, large)))
    })
}

/// A rate and its controller.
fn any_adaptive_rate() -> impl Strategy<Value = (Rate, Controller)> {
    let rates = (1e-6..=10.0, 10.0..=1e6);
    let steps = (1e-6..=1e6, 1e-6..=0.999_999, span(), 1.0..=1e3, 1e-6..=1.0);
    (rates, steps, any::<bool>(), span_or_zero()).prop_map(|((min, max), steps, starts_slowly, memory)| {
        let (increase, decrease, target, factor, weight) = steps;
        let aimd = Aimd::default().within(min..=max).increase(increase).decrease(decrease).memory(memory);
        let aimd = aimd.latency_target(target).latency_factor(factor).latency_weight(weight);
        let aimd = if starts_slowly { aimd.slow_start() } else { aimd };
        (Rate::per_second(10).burst(4), Controller::Aimd(aimd))
    })
}

fn any_controller() -> impl Strategy<Value = Controller> {
    let brake = (count(), span(), span(), count()).prop_map(|(failures, within, cooling, periods)| {
        Brake::default().at(failures, within).cooling(cooling).ceiling_periods(periods)
    });
    prop_oneof![Just(Controller::Fixed), brake.prop_map(Controller::Brake)]
}

fn any_retry() -> impl Strategy<Value = Retry> {
    let growth = prop_oneof![
        span_or_zero().prop_map(Backoff::fixed),
        (span_or_zero(), span_or_zero()).prop_map(|(a, b)| Backoff::exponential(a.min(b), a.max(b))),
    ];
    let jitter = prop_oneof![
        Just(Jitter::None),
        Just(Jitter::Full),
        (fraction(), fraction()).prop_map(|(a, b)| Jitter::Range(a.min(b)..=a.max(b))),
    ];
    let budget = (fraction(), 0..=COUNT_MAX, span());
    let refused = prop_oneof![Just(WhenRefused::Stop), Just(WhenRefused::Wait)];
    (1_u32..=1_000, growth, jitter, option::of(budget), refused).prop_map(
        |(attempts, growth, jitter, budget, refused)| {
            let retry = Retry::attempts(attempts).backoff(growth.jitter(jitter)).when_refused(refused);
            match budget {
                _ if retry.is_off() => Retry::off().when_refused(refused),
                Some((share, at_least, window)) => retry.budget(RetryBudget::new(share, at_least, window)),
                None => retry,
            }
        },
    )
}

fn any_draft() -> impl Strategy<Value = Draft> {
    let bytes =
        (units(), 1_u16..).prop_map(|(capacity, price)| Bytes::in_flight(capacity).recovering_price(price));
    // Boxed, because together these strategies overflow the stack of a test thread.
    let held = (option::of(any_slots()).boxed(), option::of(count()), option::of(bytes));
    let spent = (option::of(any_pace()).boxed(), option::of(any_rate()), option::of(any_budget()).boxed());
    let learnt =
        (option::of(any_circuit()).boxed(), any_pause().boxed(), any_controller(), any_retry().boxed());
    let counted = (option::of(any_count()), 1_u32..=100, count());
    let moved = option::weighted(0.3, any_adaptive_rate()).boxed();
    let named = (any_named(any_rate()).boxed(), any_named(any_named_budget()).boxed()).prop_map(
        |(rates, budgets)| {
            // Rates and budgets share their names.
            let budgets = budgets.into_iter().map(|named| Named::new(named.name + "_b", named.limit));
            (rates, budgets.collect::<Vec<_>>())
        },
    );
    let all = (held.boxed(), spent.boxed(), named.boxed(), learnt.boxed(), counted, moved);
    all.prop_map(|(held, spent, named, learnt, counted, moved)| {
        let (slots, recovery_slots, bytes) = held;
        let (pace, rate, budget) = spent;
        let (rates, budgets) = named;
        let (circuit, pause, controller, retry) = learnt;
        let (rate, controller) = moved.map_or((rate, controller), |(rate, moved)| (Some(rate), moved));
        let (total, milestone_percent, waiters_max) = counted;
        Draft {
            slots,
            recovery_slots,
            bytes,
            pace,
            rate,
            rates,
            budget,
            budgets,
            circuit,
            pause,
            controller,
            retry,
            total,
            milestone_percent,
            waiters_max,
        }
        .controlled_by(controller)
    })
    .prop_map(effective)
}

/// Without the numbers that would have no effect.
fn effective(mut draft: Draft) -> Draft {
    let invalid = draft.clone().check().err();
    for problem in invalid.iter().flat_map(InvalidPlan::problems) {
        match problem.field {
            "recovery_slots" => draft.recovery_slots = None,
            "bytes.recovering_price" => draft.bytes = draft.bytes.map(|bytes| bytes.recovering_price(1)),
            "pause.tail" => draft.pause = draft.pause.tail(Duration::ZERO),
            "pace.interval_max" => draft.pace = None,
            "milestone_percent" => draft.milestone_percent = Draft::default().milestone_percent,
            "controller" => draft.controller = Controller::Fixed,
            _ => {}
        }
    }
    draft
}

fn any_options() -> impl Strategy<Value = KeyedOptions> {
    let ttl = (180_u64..=366 * 86_400).prop_map(Duration::from_secs);
    (any::<bool>(), 1_usize..=1 << 30, ttl, 0_u32..=10, span_or_zero()).prop_map(
        |(enabled, keys_max, idle_ttl, shards, throttled_after)| {
            let options = KeyedOptions::default().enabled(enabled).keys_max(keys_max).idle_ttl(idle_ttl);
            options.shards(1 << shards).throttled_after(throttled_after)
        },
    )
}

/// A valid key, a near miss, or arbitrary text.
fn any_key() -> impl Strategy<Value = String> {
    let key = (0..fields().len()).prop_map(|index| fields()[index].key().to_owned());
    prop_oneof![6 => key.clone(), 1 => key.prop_map(|key| key + "x"), 1 => any::<String>(), 1 => "[a-z.]{0,12}"]
}

/// A value that a user might write.
fn any_value() -> impl Strategy<Value = String> {
    const ODD: &[&str] = &[
        "",
        "-",
        "nan",
        "-inf",
        "1e400",
        "0x",
        "null",
        "true",
        "[]",
        "{}",
        "1979-05-27",
        "'",
        "\"\"",
        "[[1]]",
    ];
    prop_oneof![
        any::<String>(),
        any::<i128>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}")),
        "[0-9]{0,25}(\\.[0-9]{0,25})?(ns|us|ms|s|m|h|d|x)?",
        "\"[0-9]{0,9}(\\.[0-9]{0,9})?(ms|s|m)\"",
        proptest::sample::select(ODD).prop_map(str::to_owned),
    ]
}

proptest! {
    #[test]
    fn valid_draft_round_trips_through_every_source(draft in any_draft()) {
        prop_assert!(draft.clone().check().is_ok(), "{:?}", draft.check());
        let config = Config::from_draft(&draft);
        prop_assert_eq!(config.to_draft(), Ok(draft));

        let text = config.to_toml();
        prop_assert_eq!(Config::from_toml(&text), Ok(config.clone()), "{}", text);
        prop_assert_eq!(Config::from_map(config.to_map()), Ok(config.clone()));
        let variables = config.to_map().into_iter().map(|(key, value)| {
            let field = fields().iter().find(|field| field.key() == key).expect("a key of the schema");
            (field.variable("TIDEGATE"), value)
        });
        prop_assert_eq!(Config::from_variables("TIDEGATE", variables), Ok(config.clone()));
        let lines: Vec<_> = text.lines().map(|line| line.replacen(' ', "\"", 1).replacen('=', ":", 1)).collect();
        let json = format!("{{ \"{} }}", lines.join(", \""));
        prop_assert_eq!(Config::from_json(&json), Ok(config.clone()), "{}", json);
    }

    #[test]
    fn valid_keyed_options_round_trip(options in any_options(), draft in any_draft()) {
        prop_assert_eq!(options.check(), Ok(options));
        let config = Config::from_draft(&draft).with_keyed(&options);
        prop_assert_eq!(config.to_keyed(), Ok((draft, options)));
        for back in [
            Config::from_toml(&config.to_toml()),
            Config::from_json(&config.to_json()),
            Config::from_map(config.to_map()),
        ] {
            prop_assert_eq!(back, Ok(config.clone()));
        }
        // A single throttle accepts none of the five.
        let refused = config.to_draft().map_err(|error| error.problems().len());
        prop_assert_eq!(refused.map(drop), Err(5));
    }

    #[test]
    fn overlaid_keys_win_and_others_stay(under in any_draft(), over in any_draft()) {
        let (under, over) = (Config::from_draft(&under), Config::from_draft(&over));
        let mut wanted = under.to_map();
        wanted.extend(over.to_map());
        prop_assert_eq!(under.overlaid_by(over).to_map(), wanted);
    }

    #[test]
    fn arbitrary_text_never_panics(text in any::<String>(), bytes in any::<Vec<u8>>()) {
        for text in [text.as_str(), &String::from_utf8_lossy(&bytes)] {
            let _ = Config::from_toml(text);
            let _ = Config::from_json(text);
            let _ = Config::from_map([(text, text)]);
            let _ = Config::from_variables(text, [(format!("{text}_TOTAL"), text)]);
            let _ = Config::from_variables("T", [(format!("T_{text}"), text)]);
        }
    }

    #[test]
    fn config_like_text_never_panics(
        pairs in proptest::collection::vec((any_key(), any_value()), 0..12),
    ) {
        let lines = |mark: &str| pairs.iter().map(|(key, value)| format!("{key} {mark} {value}")).collect::<Vec<_>>();
        let json = pairs.iter().map(|(key, value)| format!("{key:?}: {value}")).collect::<Vec<_>>().join(",");
        let variables = pairs.iter().map(|(key, value)| (format!("T_{}", key.replace('.', "_").to_uppercase()), value));
        let mut results = vec![
            Config::from_toml(&lines("=").join("\n")),
            Config::from_json(&format!("{{{json}}}")),
            Config::from_map(pairs.clone()),
            Config::from_variables("T", variables),
        ];
        // Most texts of several lines contain an error; single lines reach more of the valid paths.
        results.extend(lines("=").iter().map(|line| Config::from_toml(line)));
        results.extend(pairs.iter().map(|pair| Config::from_map([pair.clone()])));
        let mut all = Config::default();
        for result in results {
            match result {
                Ok(config) => {
                    let _ = (config.to_draft(), config.to_keyed());
                    all = all.overlaid_by(config);
                }
                Err(error) => prop_assert!(!error.problems().is_empty() && !error.to_string().contains('\n')),
            }
        }
        prop_assert_eq!(Config::from_toml(&all.to_toml()), Ok(all.clone()));
        if let Err(error) = all.to_draft() {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
