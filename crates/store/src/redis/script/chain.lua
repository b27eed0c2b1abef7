-- Returns an entity and its ancestors. A record is its version, its parent, whether it cascades, and its
-- body, separated by zero bytes.
-- KEYS: entities. ARGV: the first entity, the most to return.
local id, chain = ARGV[1], {}
while id ~= '' and #chain < tonumber(ARGV[2]) do
  local record = redis.call('HGET', KEYS[1], id)
  if not record then break end
  chain[#chain + 1] = record
  id = string.match(record, '^%d+%z([^%z]*)%z') or ''
end
return chain
