-- Leases that are past their deadline, the earliest first, and what time it is.
-- KEYS: the clock, the open leases. ARGV: how many at most.
local s, u = tell(redis.call('GET', KEYS[1]))
return redis.call('ZRANGE', KEYS[2], '-inf', s * 1000000 + u, 'BYSCORE', 'LIMIT', 0, ARGV[1])
