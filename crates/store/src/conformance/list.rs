//! The list of cases, and the macro that generates a test for each.

/// Generates a module of tests: one for each case, on a store opened by `open`.
///
/// `suite!(name, open)` generates the cases that need at most 1.5 s of the store's time each; `suite!(name,
/// open, jumps)` also those that let minutes and hours pass. `open` is an `async fn(namespace: &str) ->
/// Fixture` in the calling module, or one that returns an `Option<Fixture>`: with `None` the case is skipped.
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

/// All cases, by file.
#[macro_export]
#[doc(hidden)]
macro_rules! __tidegate_cases {
    (steady $($each:tt)+) => {
        $crate::__tidegate_each! {
            $($each)+;
            buckets:
                full_limit_is_taken_to_the_last_unit
                draw_above_the_burst_is_never_possible
                refused_draw_takes_from_no_limit
                refusal_has_available_units_and_retry_time
                draw_is_visible_before_it_is_settled
                grant_reads_each_limit_that_took_part
                zero_units_require_only_that_there_is_no_debt
                each_subject_has_its_own_buckets
                call_limit_has_its_own_bucket
                reading_balances_takes_nothing
                balances_are_of_subjects_or_of_entities
                limit_refills_exactly_by_the_stores_clock
                limit_refills_up_to_its_burst
                drained_limit_admits_at_its_retry_time
                slow_limit_refills_beside_a_busy_one
                many_draws_of_one_subject_are_counted_exactly
            ;
            cascade:
                draw_takes_from_every_level_it_names
                short_parent_leaves_the_child_uncharged
                refused_child_takes_nothing_from_its_parent
                each_level_is_drawn_for_its_own_limits
                returned_units_go_back_to_every_level
                refused_extension_takes_from_no_level
                eight_levels_are_drawn_together
                two_resources_of_one_entity_share_no_level
            ;
            rules:
                newer_rule_keeps_the_level_capped_to_its_burst
                newer_rate_refills_from_the_current_level
                refusal_reads_every_limit_by_the_newest_rule
                stale_rule_is_decided_by_the_current_one
                same_rule_at_newer_version_outdates_older_ones
                limit_added_to_a_live_bucket_is_drawn
                removed_limit_is_no_longer_enforced
                policy_change_strands_no_lease
            ;
            leases:
                cancel_returns_all_units
                cancel_returns_adjusted_and_extended_units
                settle_keeps_the_actual_usage
                settle_keeps_limits_that_it_does_not_name
                settle_above_available_units_leaves_a_debt
                lease_of_nothing_is_settled_at_its_usage
                settle_at_zero_returns_all_units
                refused_extension_leaves_the_lease_unchanged
                extension_may_name_a_new_limit
                adjustment_may_leave_a_debt
                adjustment_returns_no_more_than_is_held
                returned_units_fill_a_limit_up_to_its_burst
                leases_of_one_subject_add_up
                spend_is_a_draw_and_a_settle
            ;
            steps:
                repeated_draw_takes_nothing_more
                refused_draw_may_be_retried
                repeated_extension_takes_nothing_more
                repeated_adjustment_moves_nothing_more
                repeated_settle_returns_the_first_result
                repeated_cancel_returns_nothing_more
                draw_after_the_end_takes_nothing
                repeated_spend_takes_nothing_more
                step_after_a_later_one_is_refused
                draw_after_later_steps_takes_nothing
                steps_may_be_skipped
                cancel_before_the_draw_refuses_the_draw
                lease_that_never_drew_is_unknown
            ;
            deadlines:
                expired_lease_is_settled_at_the_units_it_holds
                expired_lease_is_returned_by_its_terms
                ended_lease_does_not_expire
                sweep_ends_no_lease_before_its_deadline
                sweep_is_bounded_and_counts_leases
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
                limit_of_a_policy_bounds_its_debt
                pooled_limit_counts_all_its_subjects
                pool_and_own_limit_are_drawn_or_neither
                usage_of_a_pool_is_listed_with_its_scope
                policy_with_an_impossible_pool_is_refused
            ;
            repairs:
                repair_sets_the_units_available
                repeated_repair_changes_nothing
                open_leases_survive_a_repair
                pool_is_repaired_by_its_key
                repair_is_audited
                invalid_repair_is_refused
                repair_adds_no_limit_to_a_full_bucket
            ;
            renewals:
                renewed_lease_outlives_its_old_deadline
                renewal_keeps_the_units_held
                renewal_never_shortens_a_deadline
                repeated_renewal_returns_the_first_result
                renewal_after_a_later_step_is_refused
                ended_lease_is_not_renewed
                expired_lease_is_not_renewed
                unknown_lease_is_not_renewed
                renewal_for_too_long_is_refused
                open_lease_is_found_by_its_id
                ended_lease_is_found_by_its_id
                unknown_lease_is_not_found
            ;
            policies:
                policy_is_read_as_written
                policies_are_read_in_the_order_of_scopes
                each_change_raises_the_version_by_one
                changes_since_a_version_are_complete
                stale_write_is_refused_with_current_version
                changes_are_applied_all_or_none
                removed_policy_does_not_exist
                scope_changed_twice_in_one_call_is_refused
                policies_are_listed_in_the_order_of_scopes
            ;
            entities:
                entity_is_read_as_written
                stale_entity_write_or_removal_is_refused
                invalid_entity_is_refused
                lineage_ends_where_cascading_ends
                lineage_has_up_to_eight_levels
                entity_with_children_is_not_removed
                entity_is_removed_with_its_policies
                buckets_of_a_removed_entity_stay
                children_are_direct_children
            ;
            tokens:
                token_is_read_as_created
                token_with_existing_id_or_secret_is_refused
                invalid_token_is_refused
                token_is_revoked_once
                token_changes_are_audited
                tokens_are_paged
                concurrent_creations_of_one_token_win_once
            ;
            ledger:
                usage_is_the_sum_of_settlements
                open_lease_is_not_in_the_ledger
                cancel_writes_nothing_to_the_ledger
                ledger_counts_each_ending_once
                spend_is_in_the_ledger_once
                parent_usage_separates_own_from_childrens
                usage_is_listed_by_entity_or_by_resource
                usage_is_listed_for_windows_starting_in_a_range
                call_limit_is_counted_under_its_name
            ;
            audit:
                every_change_is_audited_with_both_values
                refused_change_is_not_audited
                entries_of_one_change_have_one_version
                audit_is_filtered_by_key_and_time
            ;
            prune:
                usage_prune_deletes_only_ended_windows
                audit_prune_deletes_whole_changes
                prune_is_bounded_and_counts_lines
                call_limit_is_pruned_with_the_stored_one
                settlement_after_a_prune_is_counted
                listing_continues_after_a_prune
                prune_changes_only_the_ledger
            ;
            listings:
                buckets_of_a_resource_are_paged
                policies_are_paged
                entities_and_children_are_paged
                listing_continues_after_its_cursor_item_is_gone
                usage_is_paged
                audit_is_paged
                page_may_be_cut_within_one_change
                invalid_cursor_is_refused_by_every_listing
            ;
            races:
                concurrent_draws_take_exactly_the_limit
                eight_callers_take_exactly_the_limit
                concurrent_first_uses_are_all_counted
                concurrent_copies_of_a_draw_count_once
                concurrent_copies_of_a_settle_count_once
                cancel_racing_its_draw_leaves_nothing_taken
                settle_racing_a_cancel_ends_the_lease_once
                deadline_racing_an_ending_ends_the_lease_once
                levels_in_opposite_orders_do_not_deadlock
                writers_with_the_same_expectation_win_once
                draws_racing_a_rule_change_stay_exact
                random_calls_stay_exact
            ;
        }
    };
    (jumps $($each:tt)+) => {
        $crate::__tidegate_each! {
            $($each)+;
            buckets:
                minutes_refill_from_zero_and_from_debt
                polling_neither_gains_nor_loses_a_unit
            ;
            rules:
                new_rate_counts_from_its_change
            ;
            steps:
                ended_lease_is_kept_for_ten_minutes
                cancel_tombstone_is_kept_for_ten_minutes
            ;
            deadlines:
                lease_lasts_until_its_deadline
            ;
            renewals:
                lease_lives_as_long_as_it_is_renewed
            ;
            ledger:
                usage_is_stamped_with_the_time_of_the_draw
                minutes_are_counted_apart_and_sum_to_their_hour
            ;
            prune:
                oldest_hours_are_pruned_and_days_stay
                expired_lease_is_pruned_with_its_window
            ;
        }
    };
}

/// A test for each case, or its name.
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

    /// A case that is not listed would never run.
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
            include_str!("repairs.rs"),
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
