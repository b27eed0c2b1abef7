-- The latest time that was written down, and how far the clock was set back by then.
CREATE TABLE @.clock (id int PRIMARY KEY CHECK (id = 1), latest bigint NOT NULL, ahead bigint NOT NULL);
INSERT INTO @.clock VALUES (1, 0, 0);

-- `version` counts administrative changes, `audited` the entries they made.
CREATE TABLE @.namespaces (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE,
    version bigint NOT NULL DEFAULT 0, audited bigint NOT NULL DEFAULT 0
);

-- A limit: its rule, and the time at which it is full, in microseconds and parts of `amount`. `at` is when it was last
-- changed: a limit's times never run against the order of its changes. With room on each page for the next version of a row.
CREATE TABLE @.meters (
    namespace bigint NOT NULL, entity text COLLATE "C" NOT NULL, resource text COLLATE "C" NOT NULL,
    line text COLLATE "C" NOT NULL, amount bigint NOT NULL, period bigint NOT NULL, burst bigint NOT NULL,
    full_at bigint NOT NULL, part bigint NOT NULL, version bigint NOT NULL, consumed bigint NOT NULL, at bigint NOT NULL,
    PRIMARY KEY (namespace, entity, resource, line)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX meters_by_resource ON @.meters (namespace, resource, entity);

-- A lease is open until `how` tells how it ended; then `step`, `ended_at` and `digest` are what is remembered. `levels` are
-- those that it drew from, as text; `key` stands for that text.
CREATE TABLE @.leases (
    namespace bigint NOT NULL, id bytea NOT NULL, levels text, held bigint[], key bigint NOT NULL,
    step bigint NOT NULL, drawn_at bigint NOT NULL, stepped_at bigint NOT NULL, deadline bigint NOT NULL,
    on_expiry smallint NOT NULL, how smallint, ended_at bigint, digest bigint,
    PRIMARY KEY (namespace, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX leases_due ON @.leases (namespace, deadline) WHERE how IS NULL;
CREATE INDEX leases_ended ON @.leases (namespace, ended_at) WHERE how IS NOT NULL;

CREATE TABLE @.usage (
    namespace bigint NOT NULL, entity text COLLATE "C" NOT NULL, resource text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL, span smallint NOT NULL, start bigint NOT NULL,
    units bigint NOT NULL, own bigint NOT NULL, leases bigint NOT NULL,
    PRIMARY KEY (namespace, entity, resource, name, span, start)
) WITH (fillfactor = 70);
CREATE INDEX usage_by_resource ON @.usage (namespace, resource, span, entity, name, start);
CREATE INDEX usage_by_age ON @.usage (span, start);

CREATE TABLE @.entities (
    namespace bigint NOT NULL, id text COLLATE "C" NOT NULL, version bigint NOT NULL, parent text COLLATE "C",
    body text NOT NULL, PRIMARY KEY (namespace, id)
);
CREATE INDEX entities_by_parent ON @.entities (namespace, parent, id) WHERE parent IS NOT NULL;

-- `kind` is 0 for the system's, 1 for a resource's, 2 for an entity's, 3 for that of an entity for a resource.
CREATE TABLE @.policies (
    namespace bigint NOT NULL, kind bigint NOT NULL, entity text COLLATE "C" NOT NULL, resource text COLLATE "C" NOT NULL,
    version bigint NOT NULL, body text NOT NULL, PRIMARY KEY (namespace, kind, entity, resource)
);
CREATE INDEX policies_custom ON @.policies (namespace, resource, entity) WHERE kind = 3;

CREATE TABLE @.audit (
    namespace bigint NOT NULL, number bigint NOT NULL, version bigint NOT NULL, at bigint NOT NULL,
    actor text NOT NULL, filed text COLLATE "C" NOT NULL, change text NOT NULL, PRIMARY KEY (namespace, number)
);
CREATE INDEX audit_filed ON @.audit (namespace, filed, number);
CREATE INDEX audit_by_age ON @.audit (at);

-- `hash` is that of a token's secret; the body has no trace of it.
CREATE TABLE @.tokens (
    namespace bigint NOT NULL, id text COLLATE "C" NOT NULL, hash bytea NOT NULL,
    version bigint NOT NULL, body text NOT NULL, PRIMARY KEY (namespace, id)
);
CREATE UNIQUE INDEX tokens_by_hash ON @.tokens (namespace, hash);
