-- Registers subjects and returns the home of their tree, which never changes once assigned.
-- KEYS: the homes of entities, the index, the homes in use. ARGV: the home for a new tree, or '' where all
-- share one; then each level's entity and resource. Returns the home, and two entities with different homes if there are.
local home = ARGV[1]
if home ~= '' then
  local found, whose
  for i = 2, #ARGV, 2 do
    local has = redis.call('HGET', KEYS[1], ARGV[i])
    if has and found and has ~= found then return { '', { whose, ARGV[i] } } end
    if has then found, whose = has, ARGV[i] end
  end
  home = found or home
  for i = 2, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], home) end
  redis.call('SADD', KEYS[3], home)
end
for i = 2, #ARGV, 2 do
  local entity, resource = ARGV[i], ARGV[i + 1]
  redis.call('ZADD', KEYS[2], 0, 's\0' .. entity .. '\0' .. resource, 0, 'r\0' .. resource .. '\0' .. entity)
end
return { home, false }
