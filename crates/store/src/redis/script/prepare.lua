-- Makes a namespace that is not there. KEYS: what is kept of it. ARGV: the schema, how its keys are laid out.
-- Answers the schema and the layout there are, and whether they were made now.
local made = redis.call('HSETNX', KEYS[1], 'schema', ARGV[1])
redis.call('HSETNX', KEYS[1], 'layout', ARGV[2])
local found = redis.call('HMGET', KEYS[1], 'schema', 'layout')
return { found[1], found[2], made }
