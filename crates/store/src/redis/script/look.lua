-- Returns the time in microseconds, the clock's offset in microseconds, and the values of buckets. Writes
-- nothing.
-- KEYS: the clock, buckets.
local values = {}
for i = 2, #KEYS do values[i - 1] = redis.call('GET', KEYS[i]) end
local s, u, ahead = tell(redis.call('GET', KEYS[1]))
return { string.format('%.0f', s * 1000000 + u), string.format('%.0f', ahead), values }
