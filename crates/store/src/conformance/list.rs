//! The list of cases, and the macro that makes a test of each.

/// Makes a module of tests: one for each case, on a store that `open` opens.
///
/// `suite!(name, open)` makes those that need no more than 1.5 s of the store's time each, `suite!(name, open, jumps)`
/// those that let minutes and hours pass as well. `open` is an `async fn(namespace: &str) -> Fixture` beside it, or one that
/// returns an `Option<Fixture>`: with `None` the case is skipped.
#[macro_export]
#[doc(hidden)]
macro_rules! __tidegate_suite {
    ($name:ident, $open:ident $(,)?) => {
        mod $name {
            $crate::__tidegate_cases! { steady test $open }
        }
    };
    ($name:ident, $open:ident, jumps $(,)?) => {
        mod $name {
            $crate::__tidegate_cases! { steady test $open }
            $crate::__tidegate_cases! { jumps test $open }
        }
    };
}

/// Every case, by the file it is in.
#[macro_export]
#[doc(hidden)]
macro_rules! __tidegate_cases {
    (steady $($each:tt)+) => {
        $crate::__tidegate_each! {
            $($each)+;
            buckets:
                a_full_limit_is_taken_to_the_last_unit_and_no_further
                more_than_the_burst_is_never_there_and_takes_nothing
                a_refused_draw_takes_from_no_limit
                a_refusal_tells_what_is_there_and_when_to_come_back
                what_is_drawn_is_seen_by_others_before_it_is_settled
                a_grant_reads_each_limit_that_took_part
                zero_units_ask_only_that_there_is_no_debt
                each_subject_has_buckets_of_its_own
                a_limit_of_a_call_has_a_bucket_of_its_own
                looking_at_balances_takes_nothing
                balances_are_of_subjects_or_of_entities
                a_limit_refills_by_the_stores_clock_exactly
                a_limit_refills_to_its_burst_and_no_further
                a_drained_limit_says_when_and_then_admits
                a_slow_limit_beside_a_busy_one_refills
                thirteen_hundred_draws_of_one_subject_are_counted_exactly
            ;
            cascade:
                a_draw_takes_from_every_level_it_names
                a_parent_that_is_short_leaves_the_child_uncharged
                a_child_that_is_stuck_neither_takes_nor_blocks_its_parents
                each_level_is_drawn_for_the_limits_it_has
                what_returns_goes_back_to_every_level_it_came_from
                a_refused_extension_takes_from_no_level
                eight_levels_are_drawn_together
                two_resources_of_one_entity_share_no_level
            ;
            rules:
                a_newer_rule_keeps_the_level_capped_to_its_burst
                a_newer_rate_refills_from_the_level_that_was_there
                a_refusal_reads_every_limit_by_the_newest_rule
                a_stale_rule_is_decided_by_the_one_that_is_there
                the_same_rule_at_a_newer_version_outdates_what_lies_between
                a_limit_added_to_a_live_bucket_is_drawn
                a_limit_that_is_removed_binds_nobody
                no_edit_of_a_policy_strands_a_lease
            ;
            leases:
                a_cancel_returns_all_of_it
                a_cancel_returns_what_was_adjusted_and_extended
                a_settle_says_what_stays_spent
                a_settle_leaves_what_it_does_not_name
                a_settle_above_what_is_there_leaves_a_debt
                a_settle_at_nothing_returns_all_of_it
                a_refused_extension_leaves_the_lease_as_it_was
                an_extension_may_draw_a_limit_for_the_first_time
                an_adjustment_may_leave_a_debt
                an_adjustment_returns_no_more_than_is_held
                what_returns_fills_a_limit_to_its_burst_and_no_further
                leases_of_one_subject_add_up
                a_spend_is_a_draw_and_its_settle
            ;
            steps:
                the_same_draw_again_takes_nothing_more
                a_refused_draw_may_be_asked_again
                the_same_extension_again_takes_nothing_more
                the_same_adjustment_again_moves_nothing_more
                the_same_settle_again_is_answered_as_the_first_time
                the_same_cancel_again_returns_nothing_more
                a_draw_that_arrives_after_the_end_takes_nothing
                the_same_spend_again_takes_nothing_more
                a_step_that_comes_after_a_later_one_is_refused
                a_draw_that_arrives_after_later_steps_takes_nothing
                steps_may_be_left_out
                a_cancel_that_comes_first_refuses_the_draw
                a_lease_that_never_drew_is_not_known
            ;
            deadlines:
                a_lease_past_its_deadline_is_settled_at_what_it_holds
                a_lease_past_its_deadline_is_returned_where_its_terms_say_so
                a_lease_that_has_ended_does_not_expire
                a_sweep_ends_no_lease_before_its_deadline
                a_sweep_has_a_bound_and_counts_what_it_ends
                late_step_ends_lease_as_expired
                late_step_behind_many_due_is_expired
                repeat_after_deadline_is_of_endings_only
            ;
            debts:
                settle_stops_debt_at_its_bound
                settle_within_the_bound_is_taken_whole
                cancel_returns_what_the_bucket_took
                partial_return_starts_with_the_shortfall
                each_bucket_has_its_own_bound
                expiry_returns_what_the_buckets_took
                debt_beyond_the_bound_takes_no_more
                bounded_debt_is_paid_by_the_refill
                pools_are_shared_by_all_who_name_them
                longest_list_of_buckets_is_drawn
                bucket_named_twice_is_refused
            ;
            renewals:
                a_renewed_lease_does_not_expire_at_its_old_deadline
                a_renewal_changes_nothing_of_what_is_held
                a_renewal_never_shortens_a_deadline
                the_same_renewal_again_is_answered_the_same
                a_renewal_that_comes_after_a_later_step_is_refused
                a_lease_that_has_ended_is_not_renewed
                a_lease_past_its_deadline_is_not_renewed
                an_unknown_lease_is_not_renewed
                a_renewal_for_too_long_is_refused
                an_open_lease_is_found_by_its_id
                a_lease_that_has_ended_is_found_by_its_id
                an_unknown_lease_is_not_found
            ;
            policies:
                a_policy_is_read_as_it_was_written
                each_scope_is_answered_in_its_place
                each_change_raises_the_version_by_one
                changes_since_a_version_are_all_told
                a_stale_expectation_is_refused_with_the_version_that_is_there
                changes_are_made_all_or_none
                a_policy_that_is_removed_is_not_there
                a_scope_is_changed_once_at_a_time
                policies_are_listed_in_the_order_of_their_scopes
            ;
            entities:
                an_entity_is_read_as_it_was_written
                an_entity_is_written_and_removed_as_expected_only
                an_entity_that_cannot_be_is_refused
                a_lineage_goes_up_as_far_as_each_cascades
                a_lineage_has_up_to_eight_levels
                an_entity_with_others_below_it_is_not_removed
                the_policies_of_an_entity_are_removed_with_it
                the_buckets_of_an_entity_stay_when_it_is_removed
                children_are_those_directly_below
            ;
            tokens:
                a_token_is_read_as_it_was_made
                a_second_token_of_one_id_or_one_secret_is_refused
                a_token_that_cannot_be_is_refused
                a_token_is_revoked_once_and_for_good
                changes_of_tokens_are_in_the_audit
                tokens_come_in_pages
                makers_of_one_token_that_race_win_once
            ;
            ledger:
                usage_is_the_sum_of_what_was_settled
                an_open_lease_is_not_in_the_ledger
                a_cancel_writes_nothing_to_the_ledger
                the_ledger_counts_each_ending_once
                a_spend_is_in_the_ledger_once
                the_usage_of_a_parent_tells_its_own_from_its_childrens
                usage_is_listed_by_entity_or_by_resource
                usage_is_listed_for_the_windows_that_begin_in_a_range
                a_limit_of_a_call_is_used_under_its_name
            ;
            audit:
                every_change_is_in_the_audit_with_what_was_there_before
                what_is_refused_is_not_in_the_audit
                the_entries_of_one_change_have_one_version
                changes_are_found_by_what_they_are_filed_under_and_when
            ;
            prune:
                a_prune_of_usage_forgets_what_has_ended_and_nothing_else
                a_prune_of_the_audit_forgets_whole_changes_and_keeps_later_ones
                a_prune_has_a_bound_and_counts_what_it_forgets
                a_limit_of_a_call_is_pruned_with_the_one_of_its_name
                what_is_settled_after_a_prune_is_counted
                a_listing_goes_on_after_a_prune
                a_prune_changes_nothing_but_the_ledger
            ;
            listings:
                buckets_of_a_resource_come_in_pages
                policies_come_in_pages
                entities_and_children_come_in_pages
                a_listing_goes_on_though_its_place_has_gone
                usage_comes_in_pages
                the_audit_comes_in_pages
                a_page_may_be_cut_within_one_change
                a_bad_cursor_is_refused_by_every_listing
            ;
            races:
                a_hundred_and_twenty_at_once_take_exactly_the_fifty_there_are
                eight_callers_take_exactly_the_fifty_there_are
                first_uses_that_race_are_all_counted
                one_draw_sent_many_times_at_once_counts_once
                one_settle_sent_many_times_at_once_counts_once
                a_cancel_that_races_its_draw_leaves_nothing_taken
                a_settle_and_a_cancel_that_race_end_a_lease_once
                deadlines_that_race_with_endings_end_each_lease_once
                levels_in_opposite_orders_do_not_wait_for_each_other
                writers_that_race_with_one_expectation_win_once
                draws_that_race_with_a_change_of_their_rule_stay_exact
                what_callers_do_at_random_stays_exact
            ;
        }
    };
    (jumps $($each:tt)+) => {
        $crate::__tidegate_each! {
            $($each)+;
            buckets:
                minutes_refill_what_a_minute_is_worth
                polling_neither_makes_nor_loses_a_unit
            ;
            rules:
                a_rate_that_changes_counts_from_its_change
            ;
            steps:
                an_ended_lease_is_remembered_for_ten_minutes
                the_mark_of_a_cancel_is_remembered_for_ten_minutes
            ;
            deadlines:
                a_lease_has_all_of_its_hour
            ;
            renewals:
                a_lease_lives_for_as_long_as_it_is_renewed
            ;
            ledger:
                usage_is_stamped_with_the_time_of_the_draw
            ;
            prune:
                the_oldest_hours_are_pruned_and_days_and_months_stay_whole
                what_expired_before_a_prune_is_pruned_with_its_window
            ;
        }
    };
}

/// A test of each case, or its name.
#[macro_export]
#[doc(hidden)]
macro_rules! __tidegate_each {
    (test $open:ident; $($part:ident: $($case:ident)+;)+) => {
        $($(
            #[test]
            fn $case() {
                $crate::conformance::run(stringify!($case), super::$open, $crate::conformance::$part::$case);
            }
        )+)+
    };
    (names; $($part:ident: $($case:ident)+;)+) => {
        [$($(stringify!($case)),+),+]
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// A case that is written and not listed would never run.
    #[test]
    fn every_case_is_listed_once() {
        let sources = [
            include_str!("buckets.rs"),
            include_str!("cascade.rs"),
            include_str!("rules.rs"),
            include_str!("leases.rs"),
            include_str!("steps.rs"),
            include_str!("deadlines.rs"),
            include_str!("debts.rs"),
            include_str!("renewals.rs"),
            include_str!("tokens.rs"),
            include_str!("policies.rs"),
            include_str!("entities.rs"),
            include_str!("ledger.rs"),
            include_str!("audit.rs"),
            include_str!("prune.rs"),
            include_str!("listings.rs"),
            include_str!("races.rs"),
        ];
        let is_case = |line: &&str| line.starts_with("pub async fn ") && line.contains("(fixture: Fixture)");
        let name = |line: &str| line["pub async fn ".len()..].split('(').next().map(str::to_owned);
        let written = sources.iter().flat_map(|source| source.lines().filter(is_case).filter_map(name));
        let written: Vec<String> = written.collect();
        let steady = crate::__tidegate_cases! { steady names };
        let jumps = crate::__tidegate_cases! { jumps names };
        let listed: Vec<&str> = steady.into_iter().chain(jumps).collect();
        assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len(), "a case is listed twice");
        assert_eq!(
            written.iter().map(String::as_str).collect::<BTreeSet<_>>(),
            listed.into_iter().collect::<BTreeSet<_>>()
        );
    }
}
