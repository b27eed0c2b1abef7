-- Commits changes of records unless the version has changed since it was read (optimistic locking).
-- KEYS: metadata of the namespace; policies, entities, tokens, hashes of tokens, the audit; the index (last).
-- ARGV: id of the commit, version read, new version, number of the next audit entry, channel; then for each
-- record the number of its key, its field and value. An empty value deletes it.
local last, version = unpack(redis.call('HMGET', KEYS[1], 'last', 'version'))
-- A retry of a commit whose reply was lost.
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
