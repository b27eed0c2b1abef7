-- GCRA: a bucket is the time at which it is full, in seconds, microseconds, and a fraction of a microsecond
-- over the amount of its rule. Numbers are doubles, which are exact integers up to 2^53. Times are added with
-- carry and compared. Products beyond 2^53, of spans of centuries, are sums of doubled times.
local fmod = math.fmod
local MAX_S, MAX_U = 18446744073709, 551615
-- The most units that can be missing have so many bits: those of the largest time and of an amount.
local BITS_MAX = 104

local function plus(s, u, p, ds, du, dp, amount)
  s, u, p = s + ds, u + du, p + dp
  if p >= amount then u, p = u + 1, p - amount end
  if u >= 1000000 then s, u = s + 1, u - 1000000 end
  if s > MAX_S or (s == MAX_S and u > MAX_U) then s, u = MAX_S, MAX_U end
  return s, u, p
end

local function minus(s, u, p, ds, du, dp, amount)
  s, u, p = s - ds, u - du, p - dp
  if p < 0 then u, p = u - 1, p + amount end
  if u < 0 then s, u = s - 1, u + 1000000 end
  if s < 0 then return 0, 0, 0 end
  return s, u, p
end

-- Whether the first time is at most the second. It is not if a number of a damaged bucket is none.
local function is_within(s, u, p, most_s, most_u, most_p)
  return s < most_s or (s == most_s and (u < most_u or (u == most_u and p <= most_p)))
end

-- The largest time has no fraction.
local function bounded(s, u, p)
  if s == MAX_S and u == MAX_U then return s, u, 0 end
  return s, u, p
end

-- How long `units` take to refill: their product with the period, over the amount.
local function span(units, amount, period)
  local x = units * period
  if x >= 9007199254740992 then
    -- Bit by bit.
    local s, u, p = 0, 0, 0
    local ds, du, dp = span(1, amount, period)
    while units > 0 do
      local bit = fmod(units, 2)
      if bit == 1 then s, u, p = plus(s, u, p, ds, du, dp, amount) end
      ds, du, dp = plus(ds, du, dp, ds, du, dp, amount)
      units = (units - bit) / 2
    end
    return bounded(s, u, p)
  end
  local p = fmod(x, amount)
  local w = (x - p) / amount
  local u = fmod(w, 1000000)
  return (w - u) / 1000000, u, p
end

-- A row is { full at: seconds, microseconds, fraction; version; consumed; amount, period, burst; its name }.

-- When a row would be full after taking `units` now.
local function after(r, units, ns, nu)
  local s, u, p = r[1], r[2], r[3]
  if s < ns or (s == ns and u < nu) then s, u, p = ns, nu, 0 end
  local ds, du, dp = span(units, r[6], r[7])
  return plus(s, u, p, ds, du, dp, r[6])
end

-- Whether a row that is full at this time holds at least zero units now, or is at most `debt` in debt.
local function is_there(r, s, u, p, ns, nu, debt)
  local cs, cu, cp = span(r[8] + (debt or 0), r[6], r[7])
  cs, cu = cs + ns, cu + nu
  if cu >= 1000000 then cs, cu = cs + 1, cu - 1000000 end
  return is_within(s, u, p, cs, cu, cp)
end

-- The whole units missing from a row now, and the rest, times its period: long division in bits.
local function lacks(r, ns, nu)
  local amount, period = r[6], r[7]
  local s, u, p = minus(r[1], r[2], r[3], ns, nu, 0, amount)
  local ds, du, dp = span(1, amount, period)
  local spans, units = {}, 0
  while #spans < BITS_MAX and is_within(ds, du, dp, s, u, p) do
    spans[#spans + 1] = { ds, du, dp }
    ds, du, dp = plus(ds, du, dp, ds, du, dp, amount)
  end
  for i = #spans, 1, -1 do
    ds, du, dp = unpack(spans[i])
    units = units * 2
    if is_within(ds, du, dp, s, u, p) then
      s, u, p = minus(s, u, p, ds, du, dp, amount)
      units = units + 1
    end
  end
  return units, (s * 1000000 + u) * amount + p
end

-- How many of `units` can be taken before the debt exceeds `debt`.
local function within(r, units, debt, ns, nu)
  local s, u, p = after(r, units, ns, nu)
  if is_there(r, s, u, p, ns, nu, debt) then return units end
  local missing, rest = lacks(r, ns, nu)
  local room = r[8] + debt - missing - (rest > 0 and 1 or 0)
  return math.min(math.max(room, 0), units)
end

-- Changes the rule of a row. Keeps its level, capped to the new burst.
local function reshape(r, amount, period, burst, ns, nu)
  local missing, rest = lacks(r, ns, nu)
  missing = missing + burst - r[8]
  if missing < 0 then
    r[1], r[2], r[3] = ns, nu, 0
  else
    -- Rounded up: a change of rules never adds units.
    local s, u, p = span(rest, r[7], period)
    local ds, du, dp = span(s * 1000000 + u + (p > 0 and 1 or 0), amount, 1)
    s, u, p = span(missing, amount, period)
    s, u, p = bounded(plus(s, u, p, ds, du, dp, amount))
    r[1], r[2], r[3] = plus(ns, nu, 0, s, u, p, amount)
  end
  r[6], r[7], r[8] = amount, period, burst
end

-- Takes a positive delta, available or not, and returns a negative one.
local function adjust(r, delta, ns, nu)
  if delta >= 0 then
    r[1], r[2], r[3] = after(r, delta, ns, nu)
  else
    local ds, du, dp = span(-delta, r[6], r[7])
    r[1], r[2], r[3] = minus(r[1], r[2], r[3], ds, du, dp, r[6])
  end
end
