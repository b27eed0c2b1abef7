//! The lists `rates` and `budgets`: every notation, layers, and errors.

use tidegate::{Budget, Config, Draft, Named, Rate, Throttle};

use super::{MINUTE, complaint, draft, toml, variables};

fn provider() -> Draft {
    Draft::default()
        .rate_named("rpm", Rate::per_minute(500))
        .rate_named("rpd", Rate::per_day(10_000).burst(2_000))
        .budget_named("itpm", Budget::input_tokens(40_000, MINUTE))
        .budget_named("tpm", Budget::tokens(90_000, MINUTE))
}

#[test]
fn named_limits_are_read_from_every_source() {
    let text = "
        preset = 'empty'
        rates = ['rpm:500/min', 'rpd:10k/day:2k']
        budgets = ['itpm:40k/min:input_tokens', 'tpm:90k/1m:tokens']
    ";
    assert_eq!(draft(text), provider());
    let json = r#"{ "preset": "empty", "rates": ["rpm:500/min", "rpd:10000/24h:2000"],
        "budgets": "itpm:40k/min:input_tokens, tpm:90k/min" }"#;
    assert_eq!(Config::from_json(json), Ok(toml(text)));
    let pairs = [
        ("TIDEGATE_PRESET", "empty"),
        ("TIDEGATE_RATES", "rpm:500/min,rpd:10k/day:2k"),
        ("TIDEGATE_BUDGETS", "itpm:40k/min:input_tokens,tpm:90k/min"),
    ];
    assert_eq!(variables(&pairs), Ok(toml(text)));
    assert_eq!(Config::from_draft(&provider()).to_map()["rates"], "rpm:500/min, rpd:10k/day:2k");
}

#[test]
fn later_source_replaces_the_whole_list() {
    let under = toml("rates = ['rpm:500/min', 'rpd:10k/day']");
    let over = under.clone().overlaid_by(toml("rates = 'rps:5/s'")).to_draft().unwrap();
    assert_eq!(over.rates, [Named::new("rps", Rate::per_second(5))]);
    assert_eq!(under.overlaid_by(toml("rates = []")).to_draft().unwrap().rates, []);
}

#[test]
fn builder_replaces_a_limit_by_its_name() {
    let config = toml("rates = ['rpm:500/min', 'rpd:10k/day']");
    let builder = Throttle::from_config(&config).unwrap().rate_named("rpd", Rate::per_day(7));
    let capacities: Vec<_> =
        builder.build().unwrap().snapshot().limits.iter().map(|limit| limit.capacity).collect();
    assert_eq!(capacities, [500, 7]);
}

#[test]
fn errors_of_lists_show_form_and_reason() {
    let form = "a list of `name:amount/period[:burst]`, such as `rpm:500/min, rpd:10k/day`";
    let table = [
        (
            "rates = ['rpm:5']",
            format!(
                "`rates` is \"rpm:5\" in TOML, and must be {form}: there is no `/` between the amount and the period"
            ),
        ),
        ("rates = 5", format!("`rates` is 5 in TOML, and must be {form}")),
        ("rates = [5]", format!("`rates` is an array in TOML, and must be {form}")),
        (
            "rates = ['rpm:0/min']",
            format!(
                "`rates` is \"rpm:0/min\" in TOML, and must be {form}: \
                 `rates` is `rpm:0/min`, and must be a rate whose amount is from 1 to 1099511627776"
            ),
        ),
        (
            "rates = 'x:5/min'\nbudgets = 'x:5/min'",
            "`rates` is x:5/min in TOML, and must be limits with different names; \
             `budgets` is x:5/min in TOML, and must be limits with different names"
                .to_owned(),
        ),
    ];
    for (text, wanted) in table {
        assert_eq!(complaint(text), wanted);
    }
}
