-- GCRA: a bucket is the time at which it is full, in seconds, microseconds, and a fraction of a microsecond
-- over the amount of its rule. Numbers are doubles, which are exact integers up to 2^53. Smaller ones are
-- added with carry and compared; products beyond that use limbs of 24 bits, which is rare: spans of
-- centuries, and changed rules.
local fmod = math.fmod
local MAX_S, MAX_U = 18446744073709, 551615

-- Calls `work` with arithmetic for numbers beyond 2^53. The functions are created only when needed.
local function wide(work)
  local LIMB = 16777216
  local function big(x)
    local a = {}
    repeat
      local d = fmod(x, LIMB)
      a[#a + 1] = d
      x = (x - d) / LIMB
    until x == 0
    return a
  end
  local function add(a, b)
    local r, carry = {}, 0
    for i = 1, math.max(#a, #b) + 1 do
      local t = (a[i] or 0) + (b[i] or 0) + carry
      r[i] = fmod(t, LIMB)
      carry = (t - r[i]) / LIMB
    end
    return r
  end
  -- a - b, or nil if that is negative.
  local function sub(a, b)
    local r, borrow = {}, 0
    for i = 1, math.max(#a, #b) do
      local t = (a[i] or 0) - (b[i] or 0) - borrow
      borrow = t < 0 and 1 or 0
      r[i] = t + borrow * LIMB
    end
    if borrow == 0 then return r end
  end
  local function mul(a, b)
    local r = {}
    for i = 1, #a + #b do r[i] = 0 end
    for i = 1, #a do
      local carry = 0
      for j = 1, #b do
        local t = r[i + j - 1] + a[i] * b[j] + carry
        local d = fmod(t, LIMB)
        r[i + j - 1] = d
        carry = (t - d) / LIMB
      end
      r[i + #b] = carry
    end
    return r
  end
  -- Quotient and remainder by long division in bits; `d` is below 2^52.
  local function div(a, d)
    local q, r = {}, 0
    for i = #a, 1, -1 do
      local limb, bit, digit = a[i], 8388608, 0
      while bit >= 1 do
        r, digit = r * 2, digit * 2
        if limb >= bit then r, limb = r + 1, limb - bit end
        if r >= d then r, digit = r - d, digit + 1 end
        bit = bit / 2
      end
      q[i] = digit
    end
    return q, r
  end
  -- Parts over an amount as a span, saturating at the largest time.
  local function span(parts, amount)
    local micros, p = div(parts, amount)
    local seconds, u = div(micros, 1000000)
    local s = 0
    for i = #seconds, 1, -1 do s = s * LIMB + seconds[i] end
    if s > MAX_S or (s == MAX_S and u > MAX_U) then return MAX_S, MAX_U, 0 end
    return s, u, p
  end
  return work(big, add, sub, mul, div, span)
end

-- How long `units` take to refill.
local function span(units, amount, period)
  local x = units * period
  if x >= 9007199254740992 then
    return wide(function(big, _, _, mul, _, span) return span(mul(big(units), big(period)), amount) end)
  end
  local p = fmod(x, amount)
  local w = (x - p) / amount
  local u = fmod(w, 1000000)
  return (w - u) / 1000000, u, p
end

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
  return s < cs or (s == cs and (u < cu or (u == cu and p <= cp)))
end

-- The units missing from a row now, times its period, in limbs.
local function lacks(r, ns, nu, big, add, mul)
  local ds, du = r[1] - ns, r[2] - nu
  if du < 0 then ds, du = ds - 1, du + 1000000 end
  if ds < 0 then return { 0 } end
  return add(mul(add(mul(big(ds), big(1000000)), big(du)), big(r[6])), big(r[3]))
end

-- How many of `units` can be taken before the debt exceeds `debt`.
local function within(r, units, debt, ns, nu)
  local s, u, p = after(r, units, ns, nu)
  if is_there(r, s, u, p, ns, nu, debt) then return units end
  return wide(function(big, add, sub, mul, div)
    local room, fits = sub(mul(big(r[8] + debt), big(r[7])), lacks(r, ns, nu, big, add, mul)), 0
    if not room then return 0 end
    local whole = div(room, r[7])
    for i = #whole, 1, -1 do fits = fits * 16777216 + whole[i] end
    return math.min(fits, units)
  end)
end

-- Changes the rule of a row. Keeps its level, capped to the new burst.
local function reshape(r, amount, period, burst, ns, nu)
  r[1], r[2], r[3] = wide(function(big, add, sub, mul, div, span)
    local missing = lacks(r, ns, nu, big, add, mul)
    local grown = mul(big(math.abs(burst - r[8])), big(r[7]))
    if burst >= r[8] then missing = add(missing, grown) else missing = sub(missing, grown) end
    if not missing then return ns, nu, 0 end
    -- Rounded up: a change of rules never adds units.
    local units, rest = div(missing, r[7])
    local whole, left = div(mul(big(rest), big(period)), r[7])
    if left > 0 then whole = add(whole, { 1 }) end
    local s, u, p = span(add(mul(units, big(period)), whole), amount)
    return plus(ns, nu, 0, s, u, p, amount)
  end)
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
