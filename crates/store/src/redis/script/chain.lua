-- An entity and those above it: as far as each cascades, or all of them. A record is its version, its parent and whether
-- it cascades, and its body, parted by zeros.
-- KEYS: entities. ARGV: the first, how many at most, whether to go on without a cascade.
local id, chain = ARGV[1], {}
while id ~= '' and #chain < tonumber(ARGV[2]) do
  local record = redis.call('HGET', KEYS[1], id)
  if not record then break end
  chain[#chain + 1] = record
  local parent, cascades = string.match(record, '^%d+%z([^%z]*)%z([01])%z')
  id = (ARGV[3] == '1' or cascades == '1') and parent or ''
end
return chain
