//! Levels: an entity and its ancestors, drawn all or nothing.

use super::Fixture;
use super::kit::{balance, granted, levels, levels_of, on, own, refused, slow, subject};

/// With cascading each level is drawn, otherwise only the entity's own.
pub async fn draw_takes_from_every_level_it_names(fixture: Fixture) {
    let limits = [slow("rpm", 100)];
    let both = levels(0, &[("child", &limits), ("parent", &limits)]);
    let draw = fixture.draw_of(&both, &[("rpm", 1)]);
    let moved = granted(fixture.store.draw(&draw).await);
    let read: Vec<_> = moved.readings.iter().map(|reading| (reading.level, reading.moved)).collect();
    assert_eq!(read, [(0, 1), (1, 1)], "its own level first");
    assert_eq!(fixture.shows("child", "rpm").await, (99, 1));
    assert_eq!(fixture.shows("parent", "rpm").await, (99, 1));

    fixture.takes(&own("child", &limits), &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("child", "rpm").await, (98, 2));
    assert_eq!(fixture.shows("parent", "rpm").await, (99, 1));
}

/// The refusal reports the parent's limit, and nothing is taken from the child.
pub async fn short_parent_leaves_the_child_uncharged(fixture: Fixture) {
    let (five, hundred) = ([slow("rpm", 5)], [slow("rpm", 100)]);
    fixture.takes(&own("parent", &five), &[("rpm", 5)]).await;
    let levels = levels(0, &[("child", &hundred), ("parent", &five)]);
    let moved = fixture.is_refused(&levels, &[("rpm", 1)]).await;
    assert!(!balance(&moved, &levels, (0, "rpm"), 1).is_short());
    let short = balance(&moved, &levels, (1, "rpm"), 1);
    assert!(short.is_short());
    assert_eq!(short.subject, subject("parent"));
    fixture.is_untouched("child", "rpm").await;
    assert_eq!(fixture.shows("parent", "rpm").await, (0, 5));
}

/// Two children under one parent: refusals by one child's own limit take nothing from the parent and do not
/// block the other child.
pub async fn refused_child_takes_nothing_from_its_parent(fixture: Fixture) {
    let (one, ten, parent) = ([slow("rpm", 1)], [slow("rpm", 10)], [slow("rpm", 6)]);
    let stuck = levels(0, &[("stuck", &one), ("parent", &parent)]);
    let busy = levels(0, &[("busy", &ten), ("parent", &parent)]);
    fixture.takes(&stuck, &[("rpm", 1)]).await;
    for used in 2..=6 {
        for _ in 0..3 {
            fixture.is_refused(&stuck, &[("rpm", 1)]).await;
        }
        fixture.takes(&busy, &[("rpm", 1)]).await;
        assert_eq!(fixture.shows("parent", "rpm").await, (6 - used, used));
    }
    fixture.is_refused(&busy, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("stuck", "rpm").await, (0, 1));
    assert_eq!(fixture.shows("busy", "rpm").await, (5, 5));
}

/// A level without a limit ignores it.
pub async fn each_level_is_drawn_for_its_own_limits(fixture: Fixture) {
    let (child, parent) = ([slow("rpm", 10)], [slow("tpm", 100), slow("rpm", 50)]);
    let levels = levels(0, &[("child", &child), ("parent", &parent)]);
    fixture.takes(&levels, &[("rpm", 1), ("tpm", 20)]).await;
    assert_eq!(fixture.shows("child", "rpm").await, (9, 1));
    assert_eq!(fixture.shows("parent", "rpm").await, (49, 1));
    assert_eq!(fixture.shows("parent", "tpm").await, (80, 20));
    fixture.is_untouched("child", "tpm").await;
    // A limit that only the parent has also applies to the child.
    fixture.is_refused(&levels, &[("rpm", 1), ("tpm", 81)]).await;
    assert_eq!(fixture.shows("child", "rpm").await, (9, 1));
}

/// Adjusting, settling and cancelling move units at every level.
pub async fn returned_units_go_back_to_every_level(fixture: Fixture) {
    let limits = [slow("tpm", 100)];
    let levels = levels(0, &[("user", &limits), ("team", &limits), ("org", &limits)]);
    let mut settled = fixture.takes(&levels, &[("tpm", 40)]).await;
    let mut cancelled = fixture.takes(&levels, &[("tpm", 30)]).await;
    cancelled.extends(&[("tpm", 5)]).await;
    settled.adjusts(&[("tpm", -10)]).await;
    for entity in ["user", "team", "org"] {
        assert_eq!(fixture.shows(entity, "tpm").await, (35, 65), "{entity}");
    }
    let moved = cancelled.cancels().await;
    let back: Vec<_> = moved.readings.iter().map(|reading| (reading.level, reading.moved)).collect();
    assert_eq!(back, [(0, -35), (1, -35), (2, -35)]);
    settled.settles(&[("tpm", 45)]).await;
    for entity in ["user", "team", "org"] {
        assert_eq!(fixture.shows(entity, "tpm").await, (55, 45), "{entity}");
    }
}

/// Any level may refuse an extension.
pub async fn refused_extension_takes_from_no_level(fixture: Fixture) {
    let (child, parent) = ([slow("tpm", 100)], [slow("tpm", 50)]);
    let levels = levels(0, &[("child", &child), ("parent", &parent)]);
    let lease = fixture.takes(&levels, &[("tpm", 40)]).await;
    let moved = refused(fixture.store.extend(&lease.extension(1, &[("tpm", 11)])).await);
    assert!(balance(&moved, &levels, (1, "tpm"), 11).is_short());
    assert_eq!(fixture.shows("child", "tpm").await, (60, 40));
    assert_eq!(fixture.shows("parent", "tpm").await, (10, 40));
}

/// The maximum depth of a cascade.
pub async fn eight_levels_are_drawn_together(fixture: Fixture) {
    let names: Vec<String> = (0..8).map(|number| format!("e{number}")).collect();
    let limits = [slow("rpm", 10)];
    let rows: Vec<_> = names.iter().map(|name| (name.as_str(), &limits[..])).collect();
    let levels = levels(0, &rows);
    let mut lease = fixture.takes(&levels, &[("rpm", 4)]).await;
    fixture.takes(&own("e7", &limits), &[("rpm", 4)]).await;
    let moved = fixture.is_refused(&levels, &[("rpm", 3)]).await;
    let short: Vec<_> =
        (0..8).filter(|level| balance(&moved, &levels, (*level, "rpm"), 3).is_short()).collect();
    assert_eq!(short, [7], "only the uppermost is short");
    lease.cancels().await;
    for name in &names[..7] {
        assert_eq!(fixture.shows(name, "rpm").await, (10, 0), "{name}");
    }
    assert_eq!(fixture.shows("e7", "rpm").await, (6, 4));
}

/// Draws on one resource do not affect the levels of another.
pub async fn two_resources_of_one_entity_share_no_level(fixture: Fixture) {
    let limits = [slow("rpm", 10)];
    let chat = levels(0, &[("user", &limits), ("org", &limits)]);
    let other = |entity: &str| on(entity, "embed");
    let embed = levels_of(0, &[(other("user"), &limits), (other("org"), &limits)]);
    fixture.takes(&chat, &[("rpm", 10)]).await;
    fixture.is_refused(&chat, &[("rpm", 1)]).await;
    fixture.takes(&embed, &[("rpm", 10)]).await;
}
