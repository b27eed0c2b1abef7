-- Returns the time, the clock's offset in microseconds, and the values of buckets. Writes nothing.
-- KEYS: the clock, buckets.
local values = { false, false, false }
for i = 2, #KEYS do values[i + 2] = redis.call('GET', KEYS[i]) end
local s, u, ahead = tell(redis.call('GET', KEYS[1]))
for i, number in ipairs({ s, u, ahead }) do values[i] = string.format('%.0f', number) end
return values
