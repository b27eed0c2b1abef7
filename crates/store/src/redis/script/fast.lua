-- Fast path for a batch of steps, all at one time: draws and spends, and settles at what is held, where all
-- units are available and all rules are those of the caller. Rows are compared and patched in their stored
-- form. Keys that several steps share are read once, updated in turn, and written once. Draws that are equal
-- except for their leases are made in one step if all of their units are available together.
-- Every other step is left to the slow path (`lease.lua`), which covers all cases; nothing of such a step is
-- written here.
-- An open lease has a key of its own. An ended one is a field of the hash of its moment, or a key if its id
-- has no moment.
-- KEYS: the clock; leases, and buckets of draws; the open leases; other buckets, usage, and moments.
-- ARGV[1]: the number of distinct steps, the number of leases and buckets of draws, then for each step the
-- number of its leases, and each lease with its moment.
-- ARGV, then: the steps; the limits of levels, and levels as text.
-- Returns the steps that were left, then the replies to all others and then to those, each after the number
-- of steps it is for.
local call, pack, unpack_of, sub, fmod = redis.call, struct.pack, struct.unpack, string.sub, math.fmod
local NONE, LARGEST = 9007199254740992, 9007199254740991
-- Marks a lease that the slow path decides on: neither absent nor open.
local LEFT = 'left'
local steps, last = unpack_of('<HH', ARGV[1])
last = 1 + last
local open = 1 + last
-- For each step the number of its leases, then each lease with its moment.
local made_by = { unpack_of('<' .. string.rep('H', #ARGV[1] / 2 - 2), ARGV[1], 5) }
local got = call('MGET', unpack(KEYS, 1, last))
local kept = got[1]
local ns, nu, ahead, clock = tell(kept)
-- Steps that are left: number, step, and position of the lease in `made_by`.
local answers, left, left_steps, left_leases = { '' }, {}, {}, {}

-- The function that runs a step for the leases from one position to another, and the one that writes what
-- all steps change. None of both where the slow path handles the clock.
local function fast()
  local _, _, as, au = unpack_of('<dddd', kept)
  -- The slow path handles an offset, and numbers that are none.
  if as ~= 0 or au ~= 0 or ahead ~= 0 or ns ~= ns then return end
  local this_minute = ns - fmod(ns, 60)
  -- The fields of minutes, by how many minutes ago they began.
  local fields = {}
  local at_once = pack('<dd', ns, nu)
  -- Rules by index; usage by slot: its index, and 65536 for each minute ago.
  local rules_at, counted = {}, {}
  -- Pending writes: indices of buckets and slots of usage, leases that begin and that end, and the open leases.
  local expires, changed, used, is_used, begun, ended, closed, due, gone = {}, {}, {}, {}, {}, {}, {}, {}, {}
  -- The moments of the batch, the ids of each, and the pending writes of each.
  local moments, ids_at, places_at, ended_at, id_of = {}, {}, {}, {}, {}
  local at, all = 1, #made_by
  while at < all do
    local upto = at + 2 * made_by[at]
    for i = at + 1, upto, 2 do
      local place, moment = made_by[i], made_by[i + 1]
      if moment > 0 then
        local ids = ids_at[moment]
        if not ids then
          ids = { n = 0 }
          moments[#moments + 1], ids_at[moment], places_at[moment] = moment, ids, {}
        end
        local n, id = ids.n + 1, sub(KEYS[place], -32)
        ids.n, ids[n], places_at[moment][n], id_of[place] = n, id, place, id
      end
    end
    at = upto + 1
  end
  for i = 1, #moments do
    local moment = moments[i]
    local ids, places = ids_at[moment], places_at[moment]
    local found = redis.pcall('HMGET', KEYS[open + moment], unpack(ids, 1, ids.n))
    for j = 1, ids.n do
      if found[j] and not got[places[j]] then got[places[j]] = found[j] end
      -- A moment's key of another type is left to the slow path to report, for open leases too: they would be
      -- written there.
      if found.err then got[places[j]] = LEFT end
    end
  end

  local function read_rules(place)
    local blob, at, n, size, format, rules = ARGV[place], 1, 0, 8, { '<d' }, { lines = {} }
    while at <= #blob do
      local key, name, amount, period, burst, cs, cu, cp, limit, _
      key, name, amount, period, burst, cs, cu, cp, _, limit, at = unpack_of('<Hc0BdddddddHc0', blob, at)
      -- The latest time at which a bucket may be full while it is not in debt now.
      cs, cu = cs + ns, cu + nu
      if cu >= 1000000 then cs, cu = cs + 1, cu - 1000000 end
      n, size = n + 1, size + #key + 32
      rules[n] = { key, 8 * name, amount, period, burst, cs, cu, cp, pack('<Hc0', #limit, limit) }
      format[n + 1] = 'c' .. #key .. 'dddd'
    end
    rules.n, rules.size, rules.format = n, size, table.concat(format)
    rules_at[place] = rules
    return rules
  end

  -- The stored form of the usage of the limits in `mask`.
  local function read_lines(rules, amounts, from, mask)
    local lines, format, size, none = {}, { '<' }, 0, {}
    for i = 1, rules.n do
      local rule = rules[i]
      if unpack_of('<d', amounts, from + rule[2]) ~= NONE then
        lines[#lines + 1] = { rule[9], rule[2] }
        format[#format + 1] = 'c' .. #rule[9] .. 'ddd'
        size = size + #rule[9] + 24
        local n = #none
        none[n + 1], none[n + 2], none[n + 3], none[n + 4] = rule[9], 0, 0, 0
      end
    end
    lines.n, lines.size, lines.format = #lines, size, table.concat(format)
    lines.none = pack(lines.format, unpack(none))
    rules.lines[mask] = lines
    return lines
  end

  -- What a step changes if it succeeds: indices and values of buckets, and their new expiry if it changes;
  -- slots and values of usage.
  local places, values, keeps, usages, tallies, before, a, is_list = {}, {}, {}, {}, {}, {}, 1, nil

  -- Runs a step for the leases from one position to another; all or nothing.
  local function try(asked, leases, from_lease, to_lease)
    local times = 1 + (to_lease - from_lease) / 2
    local op, watched, levels, step, digest = unpack_of('<BBBI4c8', asked)
    local is_draw, is_settle = op == 0, op == 4
    if is_settle then
      if watched ~= 0 then return end
    elseif not is_draw and op ~= 1 then
      return
    end
    if op ~= 1 then
      -- The type of the last key written is checked before any write.
      if is_list == nil then is_list = type(redis.pcall('ZCARD', KEYS[open])) == 'number' end
      if not is_list then return end
    end
    local n = string.byte(asked, 32)
    local at = 33 + 8 * n
    local bucket_at, usage_at, limits_at = unpack_of('<HHH', asked, at)
    local lease
    for i = from_lease, to_lease, 2 do
      lease = got[leases[i]]
      if (not lease) == is_settle then return end
    end
    local amounts, from, ago, until_s = asked, 33, 0, ns + 600
    local span_s, span_u, on_expiry, text, due_at, _
    if is_draw then
      _, span_s, span_u, on_expiry, text = unpack_of('<dddBH', asked, at + 6 * levels)
      until_s = ns + span_s + 602
    elseif is_settle then
      if string.byte(lease) ~= 0 or #lease < 71 + 8 * n then return end
      if sub(lease, 55, 71) ~= sub(asked, 16, 32) then return end
      local done, drawn_s, due_s, due_u
      _, done, drawn_s, _, _, _, due_s, due_u = unpack_of('<BI4dddddd', lease)
      if step <= done or due_s < ns or (due_s == ns and due_u <= nu) then return end
      for i = 0, 8 * (n - 1), 8 do
        local actual = unpack_of('<d', asked, 33 + i)
        if actual ~= NONE and actual ~= unpack_of('<d', lease, 72 + i) then return end
      end
      amounts, from = lease, 72
      if drawn_s < this_minute then ago = (this_minute - drawn_s + fmod(drawn_s, 60)) / 60 end
    end

    local size = 17
    for level = 1, levels do
      if level > 1 then bucket_at, usage_at, limits_at = unpack_of('<HHH', asked, at + 6 * level - 6) end
      local rules = rules_at[limits_at] or read_rules(limits_at)
      local count, mask, bit = rules.n, 0, 1
      if is_settle then
        for i = 1, count do
          if unpack_of('<d', lease, 72 + rules[i][2]) ~= NONE then mask = mask + bit end
          bit = bit * 2
        end
      else
        local raw, keep_s = got[bucket_at], until_s
        if not raw or #raw < rules.size then return end
        local numbers = { unpack_of(rules.format, raw) }
        for i = 1, count do
          local rule, place = rules[i], 5 * i - 2
          if numbers[place - 1] ~= rule[1] then return end
          local units = unpack_of('<d', asked, 33 + rule[2])
          if units ~= NONE then
            mask = mask + bit
            local amount, x = rule[3], units * rule[4] * times
            if units > rule[5] or x >= NONE then return end
            local s, u, p = numbers[place], numbers[place + 1], numbers[place + 2]
            if s < ns or (s == ns and u < nu) then s, u, p = ns, nu, 0 end
            -- Exact: all numbers are below 2^53.
            local dp = x % amount
            local w = (x - dp) / amount
            local du = w % 1000000
            s, u, p = s + (w - du) / 1000000, u + du, p + dp
            if p >= amount then u, p = u + 1, p - amount end
            if u >= 1000000 then s, u = s + 1, u - 1000000 end
            local cs, cu = rule[6], rule[7]
            if not (s < cs or (s == cs and (u < cu or (u == cu and p <= rule[8])))) then return end
            local consumed = numbers[place + 3] + units * times
            if not (consumed <= LARGEST) then return end
            if s + 600 > keep_s then keep_s = s + 600 end
            numbers[place], numbers[place + 1], numbers[place + 2], numbers[place + 3] = s, u, p, consumed
          end
          bit = bit * 2
        end
        keeps[level] = false
        if keep_s > numbers[1] then
          -- With a margin, so that most draws leave the expiry alone. A bucket with a far expiry never
          -- expires: slow path.
          if keep_s - ns > 3999990000 then return end
          numbers[1] = keep_s + 3600
          keeps[level] = numbers[1]
        end
        places[level], values[level] = bucket_at, pack(rules.format, unpack(numbers))
        if watched ~= 0 then before[level], size = sub(raw, 1, rules.size), size + rules.size end
      end
      if is_draw or mask == 0 then
        usages[level] = nil
      else
        if count > 50 then return end
        local slot = usage_at + 65536 * ago
        local lines, raw = rules.lines[mask] or read_lines(rules, amounts, from, mask), counted[slot]
        if not raw then
          if not fields[ago] then fields[ago] = string.format('n%.0f', this_minute - 60 * ago) end
          raw = redis.pcall('HGET', KEYS[open + usage_at], fields[ago]) or lines.none
          if type(raw) ~= 'string' then return end
          counted[slot] = raw
        end
        if #raw < lines.size then return end
        local numbers = { unpack_of(lines.format, raw) }
        for i = 1, lines.n do
          local line, place = lines[i], 4 * i - 2
          if numbers[place - 1] ~= line[1] then return end
          local units = unpack_of('<d', amounts, from + line[2]) * times
          local all = numbers[place] + units
          if not (all <= LARGEST) then return end
          numbers[place], numbers[place + 2] = all, numbers[place + 2] + times
          if level == 1 then numbers[place + 1] = numbers[place + 1] + units end
        end
        usages[level], tallies[level] = slot, pack(lines.format, unpack(numbers))
        if #raw > lines.size then tallies[level] = tallies[level] .. sub(raw, lines.size + 1) end
      end
    end

    -- The reply has the buckets before the draw; each caller computes its own result from what it drew.
    answers[a + 1] = pack('<HI4B', times, size, watched ~= 0 and 10 or 0)
    answers[a + 2] = at_once
    a = a + 2
    for level = 1, levels do
      if not is_settle then
        local place, value, keep_s = places[level], values[level], keeps[level]
        if watched ~= 0 then
          a = a + 1
          answers[a] = before[level]
        end
        if not expires[place] then
          changed[#changed + 1] = place
          expires[place] = keep_s or NONE
        elseif keep_s then
          expires[place] = keep_s
        end
        local raw, length = got[place], #value
        if #raw > length then value = value .. sub(raw, length + 1) end
        got[place] = value
      end
      local usage = usages[level]
      if usage then
        counted[usage] = tallies[level]
        if not is_used[usage] then
          is_used[usage] = true
          used[#used + 1] = usage
        end
      end
    end
    if is_draw then
      local due_s, due_u = ns + span_s, nu + span_u
      if due_u >= 1000000 then due_s, due_u = due_s + 1, due_u - 1000000 end
      lease = pack('<BI4ddddddB', 0, 0, ns, nu, ns, nu, due_s, due_u, on_expiry)
        .. sub(asked, 16, 32 + 8 * n) .. ARGV[text]
      due_at = due_s * 1000000 + due_u
    else
      lease = pack('<BI4ddc8', 1, step, ns, nu, digest)
    end
    for i = from_lease, to_lease, 2 do
      local lease_at, moment = leases[i], leases[i + 1]
      got[lease_at] = lease
      if is_draw then
        local b, key = #begun, KEYS[lease_at]
        begun[b + 1], begun[b + 2] = key, lease
        due[b + 1], due[b + 2] = due_at, id_of[lease_at] or sub(key, -32)
      else
        if is_settle then gone[#gone + 1] = id_of[lease_at] or sub(KEYS[lease_at], -32) end
        if moment == 0 then
          local e = #ended
          ended[e + 1], ended[e + 2] = KEYS[lease_at], lease
        else
          if is_settle then closed[#closed + 1] = KEYS[lease_at] end
          local there = ended_at[moment]
          if not there then
            there = { n = 0 }
            ended_at[moment] = there
          end
          local n = there.n
          there.n, there[n + 1], there[n + 2] = n + 2, id_of[lease_at], lease
        end
      end
    end
    return true
  end

  local function write()
    if clock then call('SET', KEYS[1], clock) end
    clock = nil
    for i = 1, #changed do
      local place = changed[i]
      local until_s = expires[place]
      if until_s == NONE then
        -- SETRANGE keeps the key's TTL.
        call('SETRANGE', KEYS[place], '0', got[place])
      else
        call('SET', KEYS[place], got[place], 'PXAT', string.format('%.0f', until_s * 1000))
      end
    end
    for i = 1, #used do
      local slot = used[i]
      local usage = fmod(slot, 65536)
      call('HSET', KEYS[open + usage], fields[(slot - usage) / 65536], counted[slot])
    end
    for i = 1, #begun, 2 do call('SET', begun[i], begun[i + 1]) end
    for i = 1, #ended, 2 do call('SET', ended[i], ended[i + 1], 'PX', '600000') end
    for i = 1, #moments do
      local there = ended_at[moments[i]]
      if there then
        local key = KEYS[open + moments[i]]
        call('HSET', key, unpack(there, 1, there.n))
        call('PEXPIRE', key, '600000')
      end
    end
    if #closed > 0 then call('DEL', unpack(closed)) end
    if #due > 0 then call('ZADD', KEYS[open], unpack(due)) end
    if #gone > 0 then call('ZREM', KEYS[open], unpack(gone)) end
  end

  return try, write
end

local try, write
if kept then try, write = fast() end
local number, at = 0, 1
for step = 1, steps do
  local asked, count = ARGV[1 + step], made_by[at]
  local upto = at + 2 * count
  if not (try and count > 1 and try(asked, made_by, at + 1, upto - 1)) then
    for i = at + 1, upto, 2 do
      if not (try and try(asked, made_by, i, i)) then
        local n = #left + 1
        left[n], left_steps[n], left_leases[n] = number + (1 + i - at) / 2, step, i
        -- Later steps of the lease must be left too, to keep their order.
        got[made_by[i]] = LEFT
      end
    end
  end
  number, at = number + count, upto + 1
end
if #left < number then write() end
answers[1] = pack('<H' .. string.rep('H', #left), #left, unpack(left))
if #left == 0 then return table.concat(answers) end
