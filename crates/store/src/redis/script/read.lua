-- Returns the namespace's version, the count of audit entries, the time in microseconds, and records, at one
-- moment.
-- KEYS: metadata of the namespace, its clock, hashes of records. ARGV: for each record the number of its key,
-- and its field.
local version, audited = unpack(redis.call('HMGET', KEYS[1], 'version', 'audited'))
local s, u = tell(redis.call('GET', KEYS[2]))
local records = {}
for i = 1, #ARGV, 2 do
  records[#records + 1] = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
end
return { version or '0', audited or '0', string.format('%.0f', s * 1000000 + u), records }
