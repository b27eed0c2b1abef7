-- What time it is, and these buckets as they are. Nothing is written.
-- KEYS: the clock, buckets.
local values = { false, false }
for i = 2, #KEYS do values[i + 1] = redis.call('GET', KEYS[i]) end
local s, u = tell(redis.call('GET', KEYS[1]))
values[1], values[2] = string.format('%.0f', s), string.format('%.0f', u)
return values
