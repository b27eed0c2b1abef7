-- The server's time, made monotonic like core's `Anchor`: after a step back of more than a second it
-- continues at an offset to the server's clock; a smaller step back is waited out. A forward gap of more than
-- a second reduces the offset. Stored are the latest time of any decision and the offset, each in seconds and
-- microseconds.

-- Returns the time, the offset in microseconds, and the value to store, if it changes. Microseconds since
-- 1970 are below 2^53.
local function tell(kept, t)
  t = t or redis.call('TIME')
  local s, u = tonumber(t[1]), tonumber(t[2])
  if not kept then return s, u, 0, struct.pack('<dddd', s, u, 0, 0) end
  local ls, lu, as, au = struct.unpack('<dddd', kept)
  local before = as * 1000000 + au
  local ahead, gap = before, (s - ls) * 1000000 + u - lu + before
  if gap < -1000000 then
    ahead, gap = ahead - gap, 0
  elseif gap > 1000000 then
    local absorbed = math.min(gap, ahead)
    ahead, gap = ahead - absorbed, gap - absorbed
  end
  if gap < 0 then gap = 0 end
  u = lu + gap
  s, u = ls + (u - u % 1000000) / 1000000, u % 1000000
  -- Stored every second, and always while there is an offset, because gaps are measured from the stored time.
  if s > ls or ahead ~= before or (ahead > 0 and gap > 0) then
    local rest = ahead % 1000000
    return s, u, ahead, struct.pack('<dddd', s, u, (ahead - rest) / 1000000, rest)
  end
  return s, u, ahead
end
