//! The suite finds what it looks for: a store that breaks one promise fails the case that is about it.

use std::sync::Arc;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{self, Fixture};
use tidegate_store::{ManualWall, Memory};

mod broken;

use broken::{Broken, Defect};

/// What a case says of a store with this defect; nothing where it finds nothing.
fn said(defect: Defect, case: impl AsyncFnOnce(Fixture)) -> Option<String> {
    let open = async |namespace: &str| {
        let clock = ManualWall::new(Stamp::from_secs(1_800_000_000));
        let store = Memory::with_clock(clock.clone()).namespace(namespace).expect("a valid name");
        Fixture::new(Arc::new(Broken::new(store, defect)), Arc::new(clock))
    };
    let run = std::panic::AssertUnwindSafe(|| conformance::run("planted", open, case));
    let panic = std::panic::catch_unwind(run).err()?;
    let literal = || panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    Some(panic.downcast_ref::<String>().cloned().or_else(literal).expect("a case fails with a sentence"))
}

/// The case fails because of the defect, and says so in these words.
fn finds(defect: Defect, case: impl AsyncFnOnce(Fixture) + Copy, words: &str) {
    assert_eq!(said(Defect::Nothing, case), None, "without a defect the case passes");
    let said = said(defect, case).expect("the case fails");
    assert!(said.contains(words), "{said}");
}

#[test]
fn a_renewal_that_shortens_is_found() {
    finds(Defect::RenewsBack, conformance::renewals::a_renewal_never_shortens_a_deadline, "renewed for 0ns");
}

#[test]
fn a_renewal_that_is_not_made_is_found() {
    finds(
        Defect::RenewsNothing,
        conformance::renewals::a_renewed_lease_does_not_expire_at_its_old_deadline,
        // Full again, it may be forgotten.
        "was used and is not there",
    );
}

#[test]
fn late_step_that_is_accepted_is_found() {
    finds(
        Defect::NeverExpires,
        conformance::deadlines::late_step_ends_lease_as_expired,
        "a lease that was expired answers Ok",
    );
}

#[test]
fn a_token_that_is_not_revoked_is_found() {
    finds(
        Defect::KeepsOldRecords,
        conformance::tokens::a_token_is_revoked_once_and_for_good,
        "left: Version(4)",
    );
}

#[test]
fn a_draw_that_is_charged_again_is_found() {
    finds(
        Defect::ChargesRepeats,
        conformance::steps::the_same_draw_again_takes_nothing_more,
        "what is there was refused",
    );
}

#[test]
fn a_refusal_that_takes_is_found() {
    finds(Defect::TakesPartially, conformance::buckets::a_refused_draw_takes_from_no_limit, "left: (98, 2)");
}

#[test]
fn a_grant_of_what_is_not_there_is_found() {
    finds(
        Defect::GrantsWhatIsNotThere,
        conformance::races::a_hundred_and_twenty_at_once_take_exactly_the_fifty_there_are,
        "left: 120",
    );
}

#[test]
fn a_parent_that_is_not_drawn_is_found() {
    finds(
        Defect::ForgetsParents,
        conformance::cascade::a_draw_takes_from_every_level_it_names,
        "left: [(0, 1)]",
    );
}

#[test]
fn a_stale_rule_that_flips_a_bucket_is_found() {
    finds(
        Defect::FollowsStaleRules,
        conformance::rules::a_stale_rule_is_decided_by_the_one_that_is_there,
        "the answer shows that the caller is behind",
    );
}

#[test]
fn a_refusal_that_tells_nothing_is_found() {
    finds(
        Defect::SaysNothing,
        conformance::buckets::a_refusal_tells_what_is_there_and_when_to_come_back,
        "no reading of name 0 at level 0",
    );
}

#[test]
fn a_repeat_that_tells_another_time_is_found() {
    finds(
        Defect::TellsAnotherTime,
        conformance::steps::the_same_draw_again_takes_nothing_more,
        "it tells when it was decided first",
    );
}

#[test]
fn a_cancel_that_returns_nothing_is_found() {
    finds(Defect::KeepsWhatIsCancelled, conformance::leases::a_cancel_returns_all_of_it, "right: -10");
}

#[test]
fn a_cancel_that_is_in_the_ledger_is_found() {
    finds(
        Defect::KeepsWhatIsCancelled,
        conformance::ledger::a_cancel_writes_nothing_to_the_ledger,
        "left: (20, 20, 1)",
    );
}

#[test]
fn a_late_draw_that_is_granted_is_found() {
    finds(
        Defect::ForgetsMarks,
        conformance::steps::a_cancel_that_comes_first_refuses_the_draw,
        "a lease that was cancelled answers Ok(Granted",
    );
}

#[test]
fn a_lease_that_is_settled_again_is_found() {
    finds(
        Defect::SettlesTwice,
        conformance::steps::the_same_settle_again_is_answered_as_the_first_time,
        "a lease that was settled answers Ok(Moved",
    );
}

#[test]
fn an_adjustment_that_returns_too_much_is_found() {
    finds(
        Defect::ReturnsTooMuch,
        conformance::leases::an_adjustment_returns_no_more_than_is_held,
        "left: -900",
    );
}

#[test]
fn a_return_of_what_was_not_held_is_found_by_the_checker() {
    finds(Defect::ReturnsTooMuch, conformance::races::what_callers_do_at_random_stays_exact, "gave back");
}

#[test]
fn a_lease_that_expires_early_is_found() {
    finds(
        Defect::ExpiresEarly,
        conformance::deadlines::a_sweep_ends_no_lease_before_its_deadline,
        "how: Expired",
    );
}

#[test]
fn a_lease_that_never_expires_is_found() {
    finds(
        Defect::NeverExpires,
        conformance::deadlines::a_lease_past_its_deadline_is_settled_at_what_it_holds,
        "a lease that was expired answers Ok(Granted",
    );
}

#[test]
fn a_lease_that_expires_the_other_way_is_found() {
    finds(
        Defect::MixesUpExpiry,
        conformance::deadlines::a_lease_past_its_deadline_is_returned_where_its_terms_say_so,
        "has consumed",
    );
}

#[test]
fn changes_that_are_made_in_part_are_found() {
    finds(Defect::WritesOne, conformance::policies::changes_are_made_all_or_none, "answers Ok(Version(2))");
}

#[test]
fn writers_that_all_win_are_found() {
    finds(
        Defect::IgnoresVersion,
        conformance::races::writers_that_race_with_one_expectation_win_once,
        "Ok(Version(",
    );
}

#[test]
fn chain_without_ancestors_is_found() {
    finds(
        Defect::ForgetsAncestors,
        conformance::entities::a_lineage_goes_up_as_far_as_each_cascades,
        "left: [\"user\"]",
    );
}

#[test]
fn record_without_its_link_is_found() {
    finds(Defect::ForgetsLinks, conformance::listings::entities_and_children_come_in_pages, "left: []");
}

#[test]
fn an_item_lost_between_pages_is_found() {
    finds(
        Defect::SkipsAtPageEdges,
        conformance::listings::entities_and_children_come_in_pages,
        "in pages of 1",
    );
}

#[test]
fn usage_that_is_counted_twice_is_found() {
    finds(Defect::CountsUsageTwice, conformance::ledger::usage_is_the_sum_of_what_was_settled, "units: 124");
}

#[test]
fn a_ledger_that_is_not_the_sum_is_found_by_the_checker() {
    finds(Defect::CountsUsageTwice, conformance::races::what_callers_do_at_random_stays_exact, "Ledger {");
}

#[test]
fn a_prune_of_what_is_new_is_found() {
    finds(
        Defect::PrunesWhatIsNew,
        conformance::prune::a_prune_of_usage_forgets_what_has_ended_and_nothing_else,
        "nothing has ended yet",
    );
    finds(
        Defect::PrunesWhatIsNew,
        conformance::prune::a_prune_of_the_audit_forgets_whole_changes_and_keeps_later_ones,
        "left: 7",
    );
}

#[test]
fn a_prune_beyond_its_bound_is_found() {
    let case = conformance::prune::a_prune_has_a_bound_and_counts_what_it_forgets;
    finds(Defect::PrunesTooMuch, case, "at most 2 at a time");
}

#[test]
fn a_spend_without_a_trace_is_found() {
    finds(Defect::SpendsUnseen, conformance::ledger::a_spend_is_in_the_ledger_once, "left: (0, 0, 0)");
}
