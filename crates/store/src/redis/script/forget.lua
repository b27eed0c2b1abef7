-- Deletes audit entries, and returns how many existed.
-- KEYS: the audit, the index. ARGV: for each entry its number and its two members of the index.
local count = 0
for i = 1, #ARGV, 3 do
  count = count + redis.call('HDEL', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i + 1], ARGV[i + 2])
end
return count
