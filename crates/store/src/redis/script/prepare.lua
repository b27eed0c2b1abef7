-- Creates a namespace unless it exists.
-- KEYS: its metadata. ARGV: the schema version, the layout.
-- Returns the schema and layout that are stored, and whether they are new.
local made = redis.call('HSETNX', KEYS[1], 'schema', ARGV[1])
redis.call('HSETNX', KEYS[1], 'layout', ARGV[2])
local found = redis.call('HMGET', KEYS[1], 'schema', 'layout')
return { found[1], found[2], made }
