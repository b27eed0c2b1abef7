-- Returns the time in microseconds and the value of a lease, open or ended, or nil. Writes nothing.
-- KEYS: the clock, the open lease, the ended leases of its moment if it has one. ARGV: the lease.
local s, u = tell(redis.call('GET', KEYS[1]))
local found = redis.call('GET', KEYS[2])
if not found and KEYS[3] then found = redis.call('HGET', KEYS[3], ARGV[1]) end
return { string.format('%.0f', s * 1000000 + u), found }
