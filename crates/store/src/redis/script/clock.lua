-- Time by the server, which never runs back over a second: a clock that was set back goes on from where it was.
-- What is kept is the latest second that anything was decided at, and by how much the clock has been set back since.

-- What time it is, by how much that is ahead of the server's clock, and what is to be kept, if anything is.
local function tell(kept, t)
  t = t or redis.call('TIME')
  local s, u = tonumber(t[1]), tonumber(t[2])
  if not kept then return s, u, 0, struct.pack('<dddd', s, u, 0, 0) end
  local ls, lu, as, au = struct.unpack('<dddd', kept)
  s, u = s + as, u + au
  if u >= 1000000 then s, u = s + 1, u - 1000000 end
  if s > ls then return s, u, as, struct.pack('<dddd', s, u, as, au) end
  if s == ls and u >= lu then return s, u, as end
  local ds, du = ls - s, lu - u
  if du < 0 then ds, du = ds - 1, du + 1000000 end
  -- A smaller step is waited out.
  if ds < 1 or (ds == 1 and du == 0) then return ls, lu, as end
  as, au = as + ds, au + du
  if au >= 1000000 then as, au = as + 1, au - 1000000 end
  return ls, lu, as, struct.pack('<dddd', ls, lu, as, au)
end
