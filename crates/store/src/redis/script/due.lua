-- Returns leases past their deadline, the earliest first.
-- KEYS: the clock, the open leases. ARGV: the most to return.
local s, u = tell(redis.call('GET', KEYS[1]))
return redis.call('ZRANGE', KEYS[2], '-inf', s * 1000000 + u, 'BYSCORE', 'LIMIT', 0, ARGV[1])
