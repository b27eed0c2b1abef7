-- Changes that an administrator made, if nobody has made another since he looked.
-- KEYS: what is kept of the namespace; policies, entities, tokens, hashes of tokens, the audit; the index.
-- ARGV: who commits, the version that was seen, the one to be, the number of the next entry, where to announce it; then for
-- each record its key's number, field and value. Without a value it goes. The last key is the index.
local last, version = unpack(redis.call('HMGET', KEYS[1], 'last', 'version'))
-- Its answer was lost.
if last == ARGV[1] then return 1 end
if (version or '0') ~= ARGV[2] then return 0 end
for i = 6, #ARGV, 3 do
  local key, field, value = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  if tonumber(ARGV[i]) == #KEYS then
    if value == '' then redis.call('ZREM', key, field) else redis.call('ZADD', key, 0, field) end
  elseif value == '' then
    redis.call('HDEL', key, field)
  else
    redis.call('HSET', key, field, value)
  end
end
redis.call('HSET', KEYS[1], 'last', ARGV[1], 'version', ARGV[3], 'audited', ARGV[4])
redis.call('PUBLISH', ARGV[5], ARGV[3])
return 1
