//! The suite finds defects: a store that breaks one promise fails the case about it.

use std::sync::Arc;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture};
use tidegate_store::{ManualWall, Memory};

mod broken;

use broken::{BrokenStore, Defect};

/// The panic message of a case on a store with this defect; `None` if it passes.
fn failure(defect: Defect, case: impl AsyncFnOnce(Fixture)) -> Option<String> {
    let open = async |namespace: &str| {
        let clock = ManualWall::new(Stamp::from_secs(1_800_000_000));
        let store = Memory::with_clock(clock.clone()).namespace(namespace).expect("a valid name");
        Fixture::new(Arc::new(BrokenStore::new(store, defect)), Arc::new(clock))
    };
    let run = std::panic::AssertUnwindSafe(|| conformance::run("planted", open, case));
    let panic = std::panic::catch_unwind(run).err()?;
    let literal = || panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    Some(panic.downcast_ref::<String>().cloned().or_else(literal).expect("a case panics with a message"))
}

/// The case fails because of the defect, with these words.
fn finds(defect: Defect, case: impl AsyncFnOnce(Fixture) + Copy, words: &str) {
    assert_eq!(failure(Defect::Nothing, case), None, "without a defect the case passes");
    let failure = failure(defect, case).expect("the case fails");
    assert!(failure.contains(words), "{failure}");
}

#[test]
fn renewal_that_shortens_is_found() {
    finds(Defect::RenewsBack, conformance::renewals::renewal_never_shortens_a_deadline, "renewed for 0ns");
}

#[test]
fn renewal_that_is_not_applied_is_found() {
    finds(
        Defect::RenewsNothing,
        conformance::renewals::renewed_lease_outlives_its_old_deadline,
        // Full again, the bucket may be evicted.
        "was used and does not exist",
    );
}

#[test]
fn repair_that_is_not_made_is_found() {
    finds(Defect::RepairsNothing, conformance::repairs::repair_sets_the_units_available, "left: (-900");
}

#[test]
fn late_step_that_is_accepted_is_found() {
    finds(
        Defect::NeverExpires,
        conformance::deadlines::late_step_ends_lease_as_expired,
        "a lease that was expired returns Ok",
    );
}

#[test]
fn token_that_is_not_revoked_is_found() {
    finds(Defect::KeepsOldRecords, conformance::tokens::token_is_revoked_once, "left: Version(4)");
}

#[test]
fn repeated_draw_that_is_charged_is_found() {
    finds(
        Defect::ChargesRepeats,
        conformance::steps::repeated_draw_takes_nothing_more,
        "a draw of available units was refused",
    );
}

#[test]
fn refusal_that_takes_units_is_found() {
    finds(Defect::TakesPartially, conformance::buckets::refused_draw_takes_from_no_limit, "left: (98, 2)");
}

#[test]
fn grant_beyond_the_limit_is_found() {
    finds(
        Defect::GrantsBeyondLimit,
        conformance::races::concurrent_draws_take_exactly_the_limit,
        "left: 120",
    );
}

#[test]
fn parent_that_is_not_drawn_is_found() {
    finds(
        Defect::ForgetsParents,
        conformance::cascade::draw_takes_from_every_level_it_names,
        "left: [(0, 1)]",
    );
}

#[test]
fn stale_rule_that_flips_a_bucket_is_found() {
    finds(
        Defect::FollowsStaleRules,
        conformance::rules::stale_rule_is_decided_by_the_current_one,
        "the refusal shows that the caller is stale",
    );
}

#[test]
fn refusal_without_readings_is_found() {
    finds(
        Defect::OmitsReadings,
        conformance::buckets::refusal_has_available_units_and_retry_time,
        "no reading of name 0 at level 0",
    );
}

#[test]
fn repeat_with_another_time_is_found() {
    finds(
        Defect::ChangesTimeOfRepeat,
        conformance::steps::repeated_draw_takes_nothing_more,
        "it has the time of the first decision",
    );
}

#[test]
fn cancel_that_returns_nothing_is_found() {
    finds(Defect::KeepsCancelled, conformance::leases::cancel_returns_all_units, "right: -10");
}

#[test]
fn cancel_in_the_ledger_is_found() {
    finds(
        Defect::KeepsCancelled,
        conformance::ledger::cancel_writes_nothing_to_the_ledger,
        "left: (20, 20, 1)",
    );
}

#[test]
fn late_draw_that_is_granted_is_found() {
    finds(
        Defect::ForgetsCancels,
        conformance::steps::cancel_before_the_draw_refuses_the_draw,
        "a lease that was cancelled returns Ok(Granted",
    );
}

#[test]
fn second_settle_that_is_accepted_is_found() {
    finds(
        Defect::SettlesTwice,
        conformance::steps::repeated_settle_returns_the_first_result,
        "a lease that was settled returns Ok(Movement",
    );
}

#[test]
fn adjustment_that_returns_too_much_is_found() {
    finds(Defect::ReturnsTooMuch, conformance::leases::adjustment_returns_no_more_than_is_held, "left: -900");
}

#[test]
fn checker_finds_return_of_units_not_held() {
    finds(Defect::ReturnsTooMuch, conformance::races::random_calls_stay_exact, "more than the");
}

#[test]
fn debt_beyond_its_bound_is_found() {
    finds(Defect::IgnoresDebtBound, conformance::debts::settle_stops_debt_at_its_bound, "left: 299940");
}

#[test]
fn return_of_a_shortfall_is_found() {
    finds(Defect::ReturnsShortfall, conformance::debts::cancel_returns_what_the_bucket_took, "left: -300");
}

#[test]
fn pool_of_each_subject_is_found() {
    finds(Defect::SplitsPools, conformance::debts::pooled_limit_counts_all_its_subjects, "was granted");
}

#[test]
fn lease_that_expires_early_is_found() {
    finds(
        Defect::ExpiresEarly,
        conformance::deadlines::sweep_ends_no_lease_before_its_deadline,
        "how: Expired",
    );
}

#[test]
fn lease_that_never_expires_is_found() {
    finds(
        Defect::NeverExpires,
        conformance::deadlines::expired_lease_is_settled_at_the_units_it_holds,
        "a lease that was expired returns Ok(Granted",
    );
}

#[test]
fn lease_with_swapped_expiry_is_found() {
    finds(
        Defect::MixesUpExpiry,
        conformance::deadlines::expired_lease_is_returned_by_its_terms,
        "has consumed",
    );
}

#[test]
fn partial_changes_are_found() {
    finds(
        Defect::WritesOne,
        conformance::policies::changes_are_applied_all_or_none,
        "returns Ok(Version(2))",
    );
}

#[test]
fn racing_writers_that_all_win_are_found() {
    finds(
        Defect::IgnoresVersion,
        conformance::races::writers_with_the_same_expectation_win_once,
        "Ok(Version(",
    );
}

#[test]
fn chain_without_ancestors_is_found() {
    finds(
        Defect::ForgetsAncestors,
        conformance::entities::lineage_ends_where_cascading_ends,
        "left: [\"user\"]",
    );
}

#[test]
fn record_without_its_link_is_found() {
    finds(Defect::ForgetsLinks, conformance::listings::entities_and_children_are_paged, "left: []");
}

#[test]
fn item_lost_between_pages_is_found() {
    finds(Defect::SkipsAtPageEdges, conformance::listings::entities_and_children_are_paged, "in pages of 1");
}

#[test]
fn usage_counted_twice_is_found() {
    finds(Defect::CountsUsageTwice, conformance::ledger::usage_is_the_sum_of_settlements, "units: 124");
}

#[test]
fn overdrawn_usage_counted_twice_is_found() {
    finds(
        Defect::CountsUsageTwice,
        conformance::leases::lease_of_nothing_is_settled_at_its_usage,
        "left: (300, 150, 3)",
    );
}

#[test]
fn checker_finds_a_wrong_ledger() {
    finds(Defect::CountsUsageTwice, conformance::races::random_calls_stay_exact, "Ledger {");
}

#[test]
fn prune_of_recent_entries_is_found() {
    finds(
        Defect::PrunesRecent,
        conformance::prune::usage_prune_deletes_only_ended_windows,
        "nothing has ended yet",
    );
    finds(Defect::PrunesRecent, conformance::prune::audit_prune_deletes_whole_changes, "left: 7");
}

#[test]
fn prune_beyond_its_bound_is_found() {
    let case = conformance::prune::prune_is_bounded_and_counts_lines;
    finds(Defect::PrunesTooMuch, case, "at most 2 at a time");
}

#[test]
fn spend_missing_in_the_ledger_is_found() {
    finds(Defect::SpendsUnseen, conformance::ledger::spend_is_in_the_ledger_once, "left: (0, 0, 0)");
}
