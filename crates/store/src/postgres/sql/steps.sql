-- The reading of the server's clock in microseconds, or the `wall` of a caller's clock.
CREATE OR REPLACE FUNCTION @.wall(wall bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(wall, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- The latest time and the offset after the clock has read `reading`, as core's `Anchor` computes them. After
-- a step back of more than a second, time continues from `latest`; a smaller one is waited out. A forward gap
-- of more than a second reduces the offset.
CREATE OR REPLACE FUNCTION @.anchored(reading bigint, INOUT latest bigint, INOUT ahead bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    gap bigint := reading + ahead - latest;
    absorbed bigint := CASE WHEN gap > 1000000 THEN least(gap, ahead) ELSE 0 END;
BEGIN
    latest := latest + greatest(gap - absorbed, 0);
    ahead := CASE WHEN gap < -1000000 THEN ahead - gap ELSE ahead - absorbed END;
END
$$;

-- The time for a call that only reads, and its offset from the clock.
CREATE OR REPLACE FUNCTION @.look(wall bigint, OUT now bigint, OUT ahead bigint) LANGUAGE sql VOLATILE AS $$
    SELECT anchored.* FROM @.clock, LATERAL @.anchored(@.wall(wall), clock.latest, clock.ahead) AS anchored WHERE id = 1
$$;

CREATE OR REPLACE FUNCTION @.now(wall bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT now FROM @.look(wall)
$$;

-- The time for a call that changes limits, never before `seen`, the time of their last change.
CREATE OR REPLACE FUNCTION @.tick(p_wall bigint, seen bigint, OUT o_now bigint, OUT o_ahead bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    reading bigint := @.wall(p_wall);
    told @.clock;
BEGIN
    SELECT * INTO STRICT told FROM @.clock WHERE id = 1;
    SELECT * INTO o_now, o_ahead FROM @.anchored(reading, greatest(seen, told.latest), told.ahead);
    IF o_ahead <> told.ahead THEN
        SELECT * INTO STRICT told FROM @.clock WHERE id = 1 FOR UPDATE;
        -- Another transaction may have changed it.
        SELECT * INTO o_now, o_ahead FROM @.anchored(reading, greatest(seen, told.latest), told.ahead);
        UPDATE @.clock SET latest = o_now, ahead = o_ahead WHERE id = 1;
    ELSIF o_now > told.latest + 250000 THEN
        -- Written at intervals, by one call at a time.
        UPDATE @.clock SET latest = o_now
        WHERE id = (SELECT id FROM @.clock WHERE id = 1 AND latest < o_now FOR UPDATE SKIP LOCKED);
    END IF;
END
$$;

-- Decides steps of many leases, each on its own and in turn, in one transaction.
--
-- `m_` are the distinct limits by key. They are locked in that order, which prevents deadlocks; the locks
-- also cover the leases that drew from them. `c_` are the calls, `l_` their lines (a limit, and the caller's
-- rule for it), `n_` their units by name. The time at which a limit is full is computed in microseconds times
-- the amount, so that nothing is divided before it is written.
CREATE OR REPLACE FUNCTION @.steps(
    p_namespace bigint, p_wall bigint, rows_max int,
    m_entity text[], m_resource text[], m_line text[], m_limit text[], m_new int[],
    m_amount bigint[], m_period bigint[], m_burst bigint[], m_version bigint[],
    c_kind smallint[], c_lease bytea[], c_step bigint[], c_line int[], c_lines int[], c_name int[], c_names int[],
    c_version bigint[], c_span bigint[], c_expiry smallint[], c_watched boolean[], c_digest bigint[], c_key bigint[],
    c_levels text[], c_held text[],
    l_meter int[], l_name int[], l_own boolean[], l_amount bigint[], l_period bigint[], l_burst bigint[], l_debt bigint[],
    n_units bigint[],
    OUT o_missing boolean, OUT o_status smallint[], OUT o_at bigint[], OUT o_repeat boolean[], OUT o_extra bigint[],
    OUT o_levels text[], OUT o_moved bigint[], OUT o_amount bigint[], OUT o_period bigint[], OUT o_burst bigint[],
    OUT o_full bigint[], OUT o_part bigint[], OUT o_version bigint[], OUT o_consumed bigint[]
) LANGUAGE plpgsql VOLATILE
-- Forces lookups by key: plans must not depend on how few rows there were when they were made. JIT would not
-- pay.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_material = off SET plan_cache_mode = force_generic_plan SET jit = off
AS $$
DECLARE
    max_bigint CONSTANT numeric := 9223372036854775807;
    limits CONSTANT int := coalesce(array_length(m_entity, 1), 0);
    calls CONSTANT int := coalesce(array_length(c_kind, 1), 0);
    lines CONSTANT int := coalesce(array_length(l_meter, 1), 0);
    made int[]; crowded int[]; counted int; seen bigint; now bigint; wall bigint;
    v_parts numeric[]; v_amount bigint[]; v_period bigint[]; v_burst bigint[]; v_version bigint[]; v_consumed numeric[];
    v_kept bigint[];
    v_dirty boolean[] := array_fill(false, ARRAY[limits]);
    granted boolean[] := array_fill(false, ARRAY[calls]);
    c record; status smallint; is_open boolean; is_repeat boolean; is_read boolean; answered bigint; extra bigint;
    v_held bigint[]; v_shorts bigint[]; moved bigint[]; room numeric; after numeric[]; does_take boolean; is_short boolean; has_grants boolean := false;
    k int; units bigint; used bigint; present numeric; missing numeric; how_ended smallint;
    u_meter int[] := '{}'; u_own boolean[] := '{}'; u_units bigint[] := '{}'; u_drawn bigint[] := '{}';
    e_lease bytea[] := '{}'; e_step bigint[] := '{}'; e_how smallint[] := '{}'; e_digest bigint[] := '{}';
    t_lease bytea[] := '{}'; t_step bigint[] := '{}'; t_how smallint[] := '{}'; t_digest bigint[] := '{}';
BEGIN
    o_missing := false;
    IF array_length(m_new, 1) > 0 THEN
        WITH added AS (
            INSERT INTO @.meters
            SELECT p_namespace, m_entity[i], m_resource[i], m_line[i], m_amount[i], m_period[i], m_burst[i], 0, 0,
                m_version[i], 0, 0
            FROM unnest(m_new) WITH ORDINALITY AS new (i, place) ORDER BY place
            ON CONFLICT DO NOTHING RETURNING entity, resource, line
        )
        SELECT array_agg(i) INTO made FROM unnest(m_new) AS new (i)
        JOIN added ON added.entity = m_entity[i] AND added.resource = m_resource[i] AND added.line = m_line[i];
        crowded := @.crowded(p_namespace, rows_max, p_wall, m_entity, m_resource, m_line, made);
    END IF;

    -- Locks the limits by key, one by one.
    SELECT array_agg(locked.parts), array_agg(locked.amount), array_agg(locked.period), array_agg(locked.burst),
        array_agg(locked.version), array_agg(locked.consumed), array_agg(locked.kept_until), count(*),
        coalesce(max(locked.at), 0)
    INTO v_parts, v_amount, v_period, v_burst, v_version, v_consumed, v_kept, counted, seen
    FROM (
        SELECT m.full_at::numeric * m.amount + m.part AS parts, m.amount, m.period, m.burst, m.version,
            m.consumed::numeric, m.kept_until, m.at
        FROM unnest(m_entity, m_resource, m_line) AS key (entity, resource, line)
        -- A lateral lookup per key: no other plan is possible.
        CROSS JOIN LATERAL (
            SELECT * FROM @.meters WHERE namespace = p_namespace AND entity = key.entity AND resource = key.resource
                AND line = key.line FOR NO KEY UPDATE
        ) AS m
    ) AS locked;
    IF counted < limits THEN
        -- A limit was evicted: the caller retries and creates it.
        o_missing := true;
        RETURN;
    END IF;
    -- Read under the locks, so that the times of a limit follow the order of its changes. Usage is booked by
    -- the wall clock.
    SELECT o_now, o_now - o_ahead INTO now, wall FROM @.tick(p_wall, seen);

    o_status := array_fill(NULL::smallint, ARRAY[calls]);
    o_at := array_fill(now, ARRAY[calls]);
    o_repeat := array_fill(false, ARRAY[calls]);
    o_extra := array_fill(NULL::bigint, ARRAY[calls]);
    o_levels := array_fill(NULL::text, ARRAY[calls]);
    o_moved := array_fill(NULL::bigint, ARRAY[lines]);
    o_amount := o_moved; o_period := o_moved; o_burst := o_moved; o_full := o_moved; o_part := o_moved;
    o_version := o_moved; o_consumed := o_moved;

    FOR c IN
        SELECT call.*, call.number::int AS place, lease.id IS NOT NULL AS is_known, lease.levels AS drawn_levels, lease.held AS drawn_held, lease.shorts,
            lease.key AS drawn_key, lease.step AS done, lease.drawn_at, lease.stepped_at, lease.deadline, lease.on_expiry,
            lease.how, lease.ended_at, lease.digest AS ended_digest
        FROM unnest(c_kind, c_lease, c_step, c_line, c_lines, c_name, c_names, c_version, c_span, c_expiry, c_watched,
            c_digest, c_key) WITH ORDINALITY AS call (kind, id, step, line, lines, name, names, version, span, expiry,
            watched, digest, key, number)
        -- Looked up by id, one by one, regardless of statistics.
        LEFT JOIN LATERAL (
            SELECT * FROM @.leases WHERE namespace = p_namespace AND leases.id = call.id OFFSET 0
        ) AS lease ON true
        ORDER BY call.number
    LOOP
        status := 0; is_repeat := false; answered := now; extra := NULL; is_read := c.watched;
        is_open := c.is_known AND c.how IS NULL;
        -- The change of each name; NULL takes no part. A step that takes checks all limits first.
        moved := NULL; does_take := false; how_ended := NULL; used := NULL; v_held := c.drawn_held;
        -- What each line's limit did not take because its debt is bounded.
        v_shorts := c.shorts;

        IF c.kind IN (0, 1, 8) AND NOT c.is_known THEN                              -- draw, spend, repair
            does_take := true;
        ELSIF c.kind IN (0, 1, 8) AND NOT is_open THEN
            IF c.kind <> 0 AND c.how = 0 AND c.done = 0 AND c.ended_digest = c.digest THEN
                is_repeat := true; answered := c.ended_at; is_read := false;
            ELSE
                status := 2; extra := c.how;
            END IF;
        ELSIF c.kind IN (1, 8) THEN
            status := 3; extra := c.done;
        ELSIF c.kind IN (0, 2, 3, 4, 5, 6) AND is_open AND c.drawn_key <> c.key THEN
            status := 5; o_levels[c.place] := c.drawn_levels;
        ELSIF c.kind = 0 THEN
            is_repeat := true; answered := c.stepped_at; is_read := true;
        ELSIF c.kind = 7 THEN                                                        -- expire
            IF NOT is_open OR c.deadline > now THEN
                status := 4;
            ELSIF c.drawn_key = c.key THEN
                how_ended := 2;
            ELSE
                status := 5; o_levels[c.place] := c.drawn_levels;
            END IF;
        ELSIF NOT is_open THEN
            IF c.is_known AND c.kind = 5 AND c.how = 0 AND c.done = c.step AND c.ended_digest = c.digest
                OR c.is_known AND c.kind = 6 AND c.how = 1 THEN
                is_repeat := true; answered := c.ended_at; is_read := false;
            ELSIF c.is_known THEN
                status := 2; extra := c.how;
            ELSIF c.kind = 6 THEN
                -- Its draw may still arrive: an ended lease is stored, which refuses it.
                is_read := false;
                t_lease := array_append(t_lease, c.id); t_step := array_append(t_step, c.step);
                t_how := array_append(t_how, 1::smallint); t_digest := array_append(t_digest, 0::bigint);
            ELSE
                status := 4;
            END IF;
        ELSIF c.deadline <= now THEN                                                 -- any other step, too late
            status := 2; extra := 2; how_ended := 2; is_read := false;
        ELSIF c.step < c.done OR c.step = c.done AND c.kind IN (5, 6) THEN
            status := 3; extra := c.done;
        ELSIF c.step = c.done THEN
            is_repeat := true; answered := c.stepped_at; is_read := true; extra := c.deadline;
        ELSIF c.kind = 2 THEN                                                        -- extend
            does_take := true; is_read := true;
        ELSIF c.kind = 3 THEN                                                        -- adjust
            is_read := true;
            moved := array_fill(NULL::bigint, ARRAY[c.names]);
            FOR j IN 1..c.names LOOP
                units := n_units[c.name + j];
                IF units IS NOT NULL THEN
                    used := coalesce(v_held[j], 0);
                    v_held[j] := greatest(used + units, 0);
                    moved[j] := v_held[j] - used;
                END IF;
            END LOOP;
        ELSIF c.kind = 4 THEN                                                        -- renew
            extra := greatest(c.deadline, now + c.span);
            FOR j IN c.line + 1..c.line + c.lines LOOP
                IF v_held[l_name[j]] IS NOT NULL AND v_kept[l_meter[j]] < extra THEN
                    v_kept[l_meter[j]] := extra; v_dirty[l_meter[j]] := true;
                END IF;
            END LOOP;
            UPDATE @.leases l SET step = c.step, stepped_at = now, deadline = extra
            WHERE l.namespace = p_namespace AND l.id = c.id AND l.how IS NULL;
        ELSIF c.kind = 5 THEN                                                        -- settle
            how_ended := 0;
            moved := array_fill(NULL::bigint, ARRAY[c.names]);
            FOR j IN 1..c.names LOOP
                units := n_units[c.name + j];
                IF units IS NOT NULL THEN
                    moved[j] := units - coalesce(v_held[j], 0);
                    v_held[j] := units;
                ELSIF v_held[j] IS NOT NULL THEN
                    moved[j] := 0;
                END IF;
            END LOOP;
        ELSE                                                                         -- cancel
            how_ended := 1;
        END IF;

        -- The units returned by a lease that was cancelled, or that expired and returns.
        IF how_ended = 1 OR how_ended = 2 AND c.on_expiry = 1 THEN
            moved := array_fill(NULL::bigint, ARRAY[c.names]);
            FOR j IN 1..c.names LOOP
                moved[j] := -v_held[j];
            END LOOP;
        END IF;

        IF does_take THEN
            is_short := false;
            after := array_fill(NULL::numeric, ARRAY[c.lines]);
            FOR j IN 1..c.lines LOOP
                units := n_units[c.name + l_name[c.line + j]];
                CONTINUE WHEN units IS NULL;
                k := l_meter[c.line + j];
                IF k = ANY (crowded) THEN
                    status := 6;
                    EXIT;
                END IF;
                -- The newest rule that any caller brought applies, also to limits after one that is short.
                IF c.version >= v_version[k] THEN
                    IF l_amount[c.line + j] <> v_amount[k] OR l_period[c.line + j] <> v_period[k]
                        OR l_burst[c.line + j] <> v_burst[k] THEN
                        -- Keeps the level, capped to the new burst. Rounded up: a change of rules never adds
                        -- units.
                        missing := greatest(v_parts[k] - now::numeric * v_amount[k], 0)
                            + (l_burst[c.line + j] - v_burst[k])::numeric * v_period[k];
                        v_parts[k] := now::numeric * l_amount[c.line + j] + CASE WHEN missing > 0 THEN
                            div(missing * l_period[c.line + j] + v_period[k] - 1, v_period[k]) ELSE 0 END;
                        v_amount[k] := l_amount[c.line + j]; v_period[k] := l_period[c.line + j];
                        v_burst[k] := l_burst[c.line + j]; v_version[k] := c.version; v_dirty[k] := true;
                    ELSIF c.version > v_version[k] THEN
                        v_version[k] := c.version; v_dirty[k] := true;
                    END IF;
                END IF;
                present := now::numeric * v_amount[k];
                IF c.kind = 8 THEN
                    after[j] := present + greatest(v_burst[k] - units, 0)::numeric * v_period[k];
                    CONTINUE;
                END IF;
                after[j] := greatest(v_parts[k], present) + units::numeric * v_period[k];
                IF units > v_burst[k] OR after[j] > present + v_burst[k]::numeric * v_period[k] THEN
                    is_short := true;
                END IF;
            END LOOP;
            IF status <> 0 THEN
                NULL;
            ELSIF is_short THEN
                status := 1; is_read := true;
            ELSE
                FOR j IN 1..c.lines LOOP
                    CONTINUE WHEN after[j] IS NULL;
                    k := l_meter[c.line + j];
                    units := n_units[c.name + l_name[c.line + j]];
                    v_parts[k] := after[j]; v_dirty[k] := true;
                    IF c.kind = 8 THEN
                        o_moved[c.line + j] := 0;
                        CONTINUE;
                    END IF;
                    v_consumed[k] := v_consumed[k] + units;
                    IF c.kind = 1 THEN
                        u_meter := array_append(u_meter, k); u_own := array_append(u_own, l_own[c.line + j]);
                        u_units := array_append(u_units, units); u_drawn := array_append(u_drawn, wall);
                    ELSE
                        v_kept[k] := greatest(v_kept[k], coalesce(c.deadline, now + c.span));
                    END IF;
                    IF is_read THEN
                        o_moved[c.line + j] := units;
                    END IF;
                END LOOP;
                IF c.kind = 0 THEN
                    granted[c.place] := true; has_grants := true;
                ELSIF c.kind IN (1, 8) THEN
                    t_lease := array_append(t_lease, c.id); t_step := array_append(t_step, 0::bigint);
                    t_how := array_append(t_how, 0::smallint); t_digest := array_append(t_digest, c.digest);
                ELSE
                    FOR j IN 1..c.names LOOP
                        IF n_units[c.name + j] IS NOT NULL THEN
                            v_held[j] := coalesce(v_held[j], 0) + n_units[c.name + j];
                        END IF;
                    END LOOP;
                    UPDATE @.leases l SET held = v_held, step = c.step, stepped_at = now
                    WHERE l.namespace = p_namespace AND l.id = c.id AND l.how IS NULL;
                END IF;
            END IF;
        ELSIF moved IS NOT NULL THEN
            FOR j IN 1..c.lines LOOP
                units := moved[l_name[c.line + j]];
                CONTINUE WHEN units IS NULL;
                k := l_meter[c.line + j];
                IF units > 0 AND l_debt[c.line + j] IS NOT NULL THEN
                    -- Bounded by the maximum debt.
                    room := greatest(div((v_burst[k]::numeric + l_debt[c.line + j]) * v_period[k]
                        - greatest(v_parts[k] - now::numeric * v_amount[k], 0), v_period[k]), 0);
                    IF room < units THEN
                        v_shorts := coalesce(v_shorts, array_fill(0::bigint, ARRAY[c.lines]));
                        v_shorts[j] := v_shorts[j] + units - room;
                        units := room;
                    END IF;
                ELSIF units < 0 AND v_shorts[j] > 0 THEN
                    -- Returns at most the units that were taken.
                    used := least(v_shorts[j], -units);
                    v_shorts[j] := v_shorts[j] - used;
                    units := units + used;
                END IF;
                IF units > 0 THEN
                    v_parts[k] := greatest(v_parts[k], now::numeric * v_amount[k]) + units::numeric * v_period[k];
                ELSIF units < 0 THEN
                    v_parts[k] := greatest(v_parts[k] + units::numeric * v_period[k], 0);
                END IF;
                IF units <> 0 THEN
                    v_consumed[k] := v_consumed[k] + units; v_dirty[k] := true;
                    IF c.kind = 3 THEN
                        v_kept[k] := greatest(v_kept[k], c.deadline);
                    END IF;
                END IF;
                IF is_read THEN
                    o_moved[c.line + j] := units;
                END IF;
            END LOOP;
        END IF;

        IF c.kind = 3 AND moved IS NOT NULL THEN
            UPDATE @.leases l SET held = v_held, shorts = v_shorts, step = c.step, stepped_at = now
            WHERE l.namespace = p_namespace AND l.id = c.id AND l.how IS NULL;
        END IF;

        -- The ledger counts what a lease was settled at, or held when it expired, at the time of its draw.
        IF how_ended = 0 OR how_ended = 2 AND c.on_expiry = 0 THEN
            FOR j IN 1..c.lines LOOP
                units := v_held[l_name[c.line + j]];
                IF units IS NOT NULL THEN
                    u_meter := array_append(u_meter, l_meter[c.line + j]);
                    u_own := array_append(u_own, l_own[c.line + j]);
                    u_units := array_append(u_units, units); u_drawn := array_append(u_drawn, c.drawn_at);
                END IF;
            END LOOP;
        END IF;
        IF how_ended IS NOT NULL THEN
            e_lease := array_append(e_lease, c.id); e_how := array_append(e_how, how_ended);
            e_step := array_append(e_step, CASE WHEN how_ended = 2 THEN c.done ELSE c.step END);
            e_digest := array_append(e_digest, CASE WHEN how_ended = 0 THEN c.digest ELSE 0 END);
            IF c.kind = 7 THEN
                extra := c.on_expiry;
            END IF;
        END IF;

        IF is_read AND status IN (0, 1) THEN
            FOR j IN c.line + 1..c.line + c.lines LOOP
                IF o_moved[j] IS NULL THEN
                    CONTINUE WHEN NOT (is_repeat OR status = 1);
                    CONTINUE WHEN is_repeat AND v_held[l_name[j]] IS NULL;
                    CONTINUE WHEN status = 1 AND n_units[c.name + l_name[j]] IS NULL;
                    o_moved[j] := 0;
                END IF;
                k := l_meter[j];
                o_amount[j] := v_amount[k]; o_period[j] := v_period[k]; o_burst[j] := v_burst[k];
                o_full[j] := least(div(v_parts[k], v_amount[k]), max_bigint); o_part[j] := mod(v_parts[k], v_amount[k]);
                o_version[j] := v_version[k];
                o_consumed[j] := least(greatest(v_consumed[k], -max_bigint), max_bigint);
            END LOOP;
        END IF;
        o_status[c.place] := status; o_at[c.place] := answered; o_repeat[c.place] := is_repeat; o_extra[c.place] := extra;
    END LOOP;

    -- Row by row: a join planned for few rows may be cached and used for many.
    FOR k IN 1..limits LOOP
        IF v_dirty[k] THEN
            UPDATE @.meters SET amount = v_amount[k], period = v_period[k], burst = v_burst[k], version = v_version[k],
                full_at = least(div(v_parts[k], v_amount[k]), max_bigint)::bigint,
                part = mod(v_parts[k], v_amount[k])::bigint,
                consumed = least(greatest(v_consumed[k], -max_bigint), max_bigint)::bigint, at = now,
                kept_until = v_kept[k]
            WHERE namespace = p_namespace AND entity = m_entity[k] AND resource = m_resource[k] AND line = m_line[k];
        ELSIF k = ANY (made) THEN
            -- A limit created for a refused draw equals a missing one.
            DELETE FROM @.meters
            WHERE namespace = p_namespace AND entity = m_entity[k] AND resource = m_resource[k] AND line = m_line[k];
        END IF;
    END LOOP;
    IF has_grants THEN
        INSERT INTO @.leases (namespace, id, levels, held, key, step, drawn_at, stepped_at, deadline, on_expiry)
        SELECT p_namespace, new.id, new.levels, new.held::bigint[], new.key, 0, wall, now, now + new.span, new.expiry
        FROM unnest(c_lease, c_levels, c_held, c_key, c_span, c_expiry, granted)
            AS new (id, levels, held, key, span, expiry, is_granted)
        WHERE new.is_granted ORDER BY new.id;
    END IF;
    IF array_length(t_lease, 1) > 0 THEN
        INSERT INTO @.leases (namespace, id, key, step, drawn_at, stepped_at, deadline, on_expiry, how, ended_at, digest)
        SELECT p_namespace, new.id, 0, new.step, 0, 0, 0, 0, new.how, now, new.digest
        FROM unnest(t_lease, t_step, t_how, t_digest) AS new (id, step, how, digest) ORDER BY new.id;
    END IF;
    FOR k IN 1..coalesce(array_length(e_lease, 1), 0) LOOP
        UPDATE @.leases SET levels = NULL, held = NULL, shorts = NULL, step = e_step[k], how = e_how[k], ended_at = now,
            digest = e_digest[k]
        WHERE namespace = p_namespace AND id = e_lease[k] AND how IS NULL;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a lease was ended by somebody who does not hold its limits' USING ERRCODE = '40001';
        END IF;
    END LOOP;
    IF array_length(u_meter, 1) > 0 THEN
        INSERT INTO @.usage
        SELECT p_namespace, m_entity[u.meter], m_resource[u.meter], m_limit[u.meter], spans.span, spans.start,
            least(sum(u.units), max_bigint), least(sum(CASE WHEN u.own THEN u.units ELSE 0 END), max_bigint), count(*)
        FROM unnest(u_meter, u_own, u_units, u_drawn) AS u (meter, own, units, drawn),
            LATERAL (VALUES (3::smallint, u.drawn - u.drawn % 60000000), (0::smallint, u.drawn - u.drawn % 3600000000),
                (1::smallint, u.drawn - u.drawn % 86400000000),
                (2::smallint, (extract(epoch FROM date_trunc('month', to_timestamp(u.drawn / 1000000) AT TIME ZONE 'UTC'))
                    * 1000000)::bigint)) AS spans (span, start)
        GROUP BY 2, 3, 4, 5, 6 ORDER BY 2, 3, 4, 5, 6
        ON CONFLICT (namespace, entity, resource, name, span, start) DO UPDATE SET
            units = least(usage.units::numeric + excluded.units, max_bigint)::bigint,
            own = least(usage.own::numeric + excluded.own, max_bigint)::bigint,
            leases = usage.leases + excluded.leases;
    END IF;
END
$$;

-- Returns the limits in `made` whose subjects have too many. First deletes full limits that callers supplied,
-- which equal new ones; locked ones are skipped.
CREATE OR REPLACE FUNCTION @.crowded(
    p_namespace bigint, rows_max int, p_wall bigint, m_entity text[], m_resource text[], m_line text[], made int[]
) RETURNS int[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    crowded int[] := '{}'; i int; counted bigint; now bigint;
BEGIN
    FOREACH i IN ARRAY coalesce(made, '{}') LOOP
        SELECT count(*) INTO counted FROM @.meters
        WHERE namespace = p_namespace AND entity = m_entity[i] AND resource = m_resource[i];
        IF counted > rows_max THEN
            now := @.now(p_wall);
            DELETE FROM @.meters gone USING (
                SELECT namespace, entity, resource, line FROM @.meters
                WHERE namespace = p_namespace AND entity = m_entity[i] AND resource = m_resource[i]
                    AND position('~' IN line) > 0 AND full_at < now AND line <> ALL (m_line)
                FOR UPDATE SKIP LOCKED
            ) AS full_ones
            WHERE gone.namespace = full_ones.namespace AND gone.entity = full_ones.entity
                AND gone.resource = full_ones.resource AND gone.line = full_ones.line;
            GET DIAGNOSTICS counted = ROW_COUNT;
            IF counted = 0 THEN
                crowded := array_append(crowded, i);
            END IF;
        END IF;
    END LOOP;
    RETURN crowded;
END
$$;
