-- Forgets entries of the audit, and answers how many were there.
-- KEYS: the audit, the index. ARGV: for each its number and what it is found by.
local count = 0
for i = 1, #ARGV, 3 do
  count = count + redis.call('HDEL', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i + 1], ARGV[i + 2])
end
return count
