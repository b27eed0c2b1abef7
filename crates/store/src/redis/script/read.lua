-- The version of the namespace, and policies as of it. KEYS: what is kept of it, policies. ARGV: scopes.
local answer = { redis.call('HGET', KEYS[1], 'version') or '0' }
for i = 1, #ARGV do answer[i + 1] = redis.call('HGET', KEYS[2], ARGV[i]) end
return answer
