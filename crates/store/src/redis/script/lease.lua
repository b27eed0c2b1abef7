-- Slow path: any step of a lease. All limits of all levels, the lease and its usage are decided at one time.
-- Everything is read and computed before the first write, so that an error changes nothing and affects this
-- step only.
local DRAW, SPEND, EXTEND, ADJUST, SETTLE, CANCEL, RENEW, EXPIRE, REPAIR = 0, 1, 2, 3, 4, 5, 6, 7, 8
local GRANTED, REFUSED, REPEATED, ENDED, LATE, UNKNOWN, ELSEWHERE, FULL, FAILED = 0, 1, 2, 3, 4, 5, 6, 7, 8
local SETTLED, CANCELLED, EXPIRED = 1, 2, 3
local ROWS_MAX, REMEMBERED = 64, 600
-- The server's clock, by which usage is booked.
local wu = (nu - ahead) % 1000000
local ws = ns + (nu - ahead - wu) / 1000000

-- Returns the reply and the writes of a step.
local function make(which)
  local ask, at, writes = ARGV[1 + left_steps[which]], nil, {}
  local op, watched, levels, step, digest, identity, names
  op, watched, levels, step, digest, identity, names, at = unpack_of('<BBBI4c8c16B', ask)
  local asked = {}
  for i = 1, names do asked[i], at = unpack_of('<d', ask, at) end
  local lease_key, limits, bucket_keys, usage_keys, place = KEYS[made_by[left_leases[which]]], {}, {}, {}, nil
  for level = 1, levels do
    local bucket, usage
    bucket, usage, place, at = unpack_of('<HHH', ask, at)
    bucket_keys[level] = KEYS[op <= SPEND and bucket or open + bucket]
    usage_keys[level], limits[level] = KEYS[open + usage], ARGV[place]
  end
  local version, span_s, span_u, on_expiry, text_at = unpack_of('<dddBH', ask, at)
  local lease_id, moment, moment_key = sub(lease_key, -32), made_by[1 + left_leases[which]], nil
  if moment > 0 then moment_key = KEYS[open + moment] end
  local lease = call('GET', lease_key)
  if not lease and moment_key then lease = call('HGET', moment_key, lease_id) end

  -- Buckets by level, which no two levels share.
  local buckets = {}
  local function load_buckets()
    for level = 1, levels do
      local b = { key = bucket_keys[level], expires = 0, keep = 0, n = 0, rows = {} }
      local raw = call('GET', b.key)
      if raw then
        local pos
        b.expires, pos = unpack_of('<d', raw)
        local size, n, rows = #raw, 0, b.rows
        while pos <= size do
          local name, s, u, p, v, c, a, per, burst
          name, a, per, burst, v, s, u, p, c, pos = unpack_of('<Hc0dddddddd', raw, pos)
          local r = { s, u, p, v, c, a, per, burst, name }
          n = n + 1
          b[n], rows[name] = r, r
        end
        b.n = n
      end
      buckets[level] = b
    end
  end

  local function each_limit(amounts, visit)
    for level = 1, levels do
      local blob, pos, b = limits[level], 1, buckets[level]
      local size = #blob
      while pos <= size do
        local key, name, amount, period, burst, debt, limit, _
        key, name, amount, period, burst, _, _, _, debt, limit, pos = unpack_of('<Hc0BdddddddHc0', blob, pos)
        local row = sub(key, 3, -33)
        local units = amounts[name + 1]
        if units ~= NONE then visit(level, b, row, name, units, amount, period, burst, limit, debt) end
      end
    end
  end

  local function new_row(row, amount, period, burst) return { 0, 0, 0, version, 0, amount, period, burst, row } end

  local function insert(b, r)
    b.n = b.n + 1
    b[b.n], b.rows[r[9]] = r, r
  end

  local function consume(r, units)
    local c = r[5] + units
    if c > LARGEST then c = LARGEST elseif c < -LARGEST then c = -LARGEST end
    r[5] = c
  end

  -- A bucket is kept until a while after it is full and after the leases that drew from it have ended.
  local function write_buckets()
    for level = 1, levels do
      local b = buckets[level]
      if b.changed then
        b.changed = false
        local until_s, parts = b.keep + REMEMBERED, {}
        for i = 1, b.n do
          local r = b[i]
          if r[1] + REMEMBERED > until_s then until_s = r[1] + REMEMBERED end
          parts[i + 1] = pack('<Hc0dddddddd', #r[9], r[9], r[6], r[7], r[8], r[4], r[1], r[2], r[3], r[5])
        end
        -- With a margin, so that most draws leave the expiry alone.
        if until_s > b.expires then b.expires = until_s + 3600 end
        parts[1] = pack('<d', b.expires)
        local write = { 'SET', b.key, table.concat(parts) }
        if b.expires - ns < 4000000000 then
          -- By the server's clock, which is never ahead of this time: no bucket expires too early.
          write[4], write[5] = 'PXAT', string.format('%.0f', b.expires * 1000)
        end
        writes[#writes + 1] = write
      end
    end
  end

  local readings = {}
  local function read(level, name, moved, r)
    readings[#readings + 1] =
      pack('<BBddddddddd', level - 1, name, moved, r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8])
  end

  local function reply(code, s, u) return pack('<Bdd', code, s, u) .. table.concat(readings) end

  local function repeated(s, u, held)
    load_buckets()
    each_limit(held, function(level, b, row, name, _, amount, period, burst)
      read(level, name, 0, b.rows[row] or new_row(row, amount, period, burst))
    end)
    return reply(REPEATED, s, u)
  end

  -- Drops full limits that callers supplied: they equal new ones.
  local function make_room(b)
    local n = 0
    for i = 1, b.n do
      local r = b[i]
      b[i] = nil
      if string.find(r[9], '~', 1, true) and (r[1] < ns or (r[1] == ns and r[2] < nu)) then
        b.rows[r[9]] = nil
      else
        n = n + 1
        b[n] = r
      end
    end
    b.changed, b.n = b.changed or n < b.n, n
  end

  -- Applies the caller's rule to a row, unless it is older.
  local function follow(b, r, amount, period, burst)
    if version < r[4] then return end
    if version > r[4] then r[4], b.changed = version, true end
    if r[6] ~= amount or r[7] ~= period or r[8] ~= burst then
      reshape(r, amount, period, burst, ns, nu)
      b.changed = true
    end
  end

  -- Takes units of every limit, or none. Changed rules are applied either way.
  local function take(keep_s, is_read)
    load_buckets()
    local parts, has_all, is_full, fresh = {}, true, false, {}
    each_limit(asked, function(level, b, row, name, units, amount, period, burst)
      local r = b.rows[row]
      if r then
        follow(b, r, amount, period, burst)
      else
        r = new_row(row, amount, period, burst)
        if b.n + (fresh[b] or 0) >= ROWS_MAX then make_room(b) end
        if b.n + (fresh[b] or 0) >= ROWS_MAX then is_full = true end
        fresh[b] = (fresh[b] or 0) + 1
      end
      local s, u, p = after(r, units, ns, nu)
      if units > r[8] or not is_there(r, s, u, p, ns, nu) then has_all = false end
      parts[#parts + 1] = { level, b, r, name, units, s, u, p }
    end)
    if is_full then return FULL end
    for i = 1, #parts do
      local level, b, r, name, units, s, u, p = unpack(parts[i])
      if has_all then
        r[1], r[2], r[3] = s, u, p
        consume(r, units)
        if not b.rows[r[9]] then insert(b, r) end
        b.changed = true
        if keep_s > b.keep then b.keep = keep_s end
      end
      if is_read or not has_all then read(level, name, has_all and units or 0, r) end
    end
    write_buckets()
    return has_all and GRANTED or REFUSED
  end

  -- Units that the lease holds but buckets did not take because their debt is bounded, by level and name.
  local shorts = {}

  -- Moves each limit by its delta, at most to the bound of its debt, and returns at most what it took.
  local function shift(deltas, is_read)
    load_buckets()
    each_limit(deltas, function(level, b, row, name, delta, amount, period, burst, _, debt)
      local r = b.rows[row]
      local place = level * 256 + name
      local short = shorts[place] or 0
      if delta > 0 and debt < NONE then
        local taken = within(r or new_row(row, amount, period, burst), delta, debt, ns, nu)
        short, delta = short + delta - taken, taken
      elseif delta < 0 then
        local never = math.min(short, -delta)
        short, delta = short - never, delta + never
      end
      shorts[place] = short > 0 and short or nil
      if not r then
        r = new_row(row, amount, period, burst)
        if delta ~= 0 then insert(b, r) end
      end
      if delta ~= 0 then
        adjust(r, delta, ns, nu)
        consume(r, delta)
        b.changed = true
      end
      if is_read then read(level, name, delta, r) end
    end)
    write_buckets()
  end

  -- Adds the used units to the ledger, in the minute of the draw.
  local function count(used, drawn_s)
    local field = string.format('n%.0f', drawn_s - fmod(drawn_s, 60))
    for level = 1, levels do buckets[level] = buckets[level] or {} end
    local tallies = {}
    each_limit(used, function(level, _, _, _, units, _, _, _, limit)
      local t = tallies[level]
      if not t then
        t = { by_name = {} }
        tallies[level] = t
        local raw, pos = call('HGET', usage_keys[level], field), 1
        while raw and pos <= #raw do
          local known, all, own, leases
          known, all, own, leases, pos = unpack_of('<Hc0ddd', raw, pos)
          local line = { known, all, own, leases }
          t[#t + 1], t.by_name[known] = line, line
        end
      end
      local line = t.by_name[limit]
      if not line then
        line = { limit, 0, 0, 0 }
        t[#t + 1], t.by_name[limit] = line, line
      end
      line[2] = math.min(line[2] + units, LARGEST)
      if level == 1 then line[3] = math.min(line[3] + units, LARGEST) end
      line[4] = math.min(line[4] + 1, LARGEST)
    end)
    for level, t in pairs(tallies) do
      local parts = {}
      for i = 1, #t do parts[i] = pack('<Hc0ddd', #t[i][1], unpack(t[i])) end
      writes[#writes + 1] = { 'HSET', usage_keys[level], field, table.concat(parts) }
    end
  end

  local function write_open(o_step, drawn_s, drawn_u, due_s, due_u, o_expiry, held, text)
    local parts =
      { pack('<BI4ddddddBc16B', 0, o_step, drawn_s, drawn_u, ns, nu, due_s, due_u, o_expiry, identity, names) }
    for i = 1, names do parts[i + 1] = pack('<d', held[i]) end
    -- A shortfall begins with byte 1, which no level's text does.
    for place, units in pairs(shorts) do parts[#parts + 1] = pack('<BHd', 1, place, units) end
    parts[#parts + 1] = text
    writes[#writes + 1] = { 'SET', lease_key, table.concat(parts) }
  end

  local function due_at(due_s, due_u)
    -- The type of the last key written is checked before any write.
    call('ZCARD', KEYS[open])
    writes[#writes + 1] = { 'ZADD', KEYS[open], due_s * 1000000 + due_u, lease_id }
  end

  local function write_ended(how, last, is_known)
    local ended = pack('<BI4ddc8', how, last, ns, nu, digest)
    if moment_key then
      call('HLEN', moment_key)
      writes[#writes + 1] = { 'HSET', moment_key, lease_id, ended }
      writes[#writes + 1] = { 'PEXPIRE', moment_key, REMEMBERED * 1000 }
      if is_known then writes[#writes + 1] = { 'DEL', lease_key } end
    else
      writes[#writes + 1] = { 'SET', lease_key, ended, 'PX', REMEMBERED * 1000 }
    end
    if is_known then
      call('ZCARD', KEYS[open])
      writes[#writes + 1] = { 'ZREM', KEYS[open], lease_id }
    end
  end

  local how, o_step, drawn_s, drawn_u, stepped_s, stepped_u, due_s, due_u, o_expiry, o_identity
  local held, text = {}, ''
  if lease then
    how = string.byte(lease)
    if how > 0 then
      local e_step, e_s, e_u, e_digest
      how, e_step, e_s, e_u, e_digest = unpack_of('<BI4ddc8', lease)
      local is_same = (op == CANCEL and how == CANCELLED)
        or ((op == SETTLE or op == SPEND or op == REPAIR) and how == SETTLED and e_step == step and e_digest == digest)
      if is_same then return reply(REPEATED, e_s, e_u) end
      return pack('<BB', ENDED, how)
    end
    local n, pos
    how, o_step, drawn_s, drawn_u, stepped_s, stepped_u, due_s, due_u, o_expiry, o_identity, n, pos =
      unpack_of('<BI4ddddddBc16B', lease)
    for i = 1, n do held[i], pos = unpack_of('<d', lease, pos) end
    while string.byte(lease, pos) == 1 do
      local place, units, _
      _, place, units, pos = unpack_of('<BHd', lease, pos)
      shorts[place] = units
    end
    text = sub(lease, pos)
    if op == SPEND or op == REPAIR then return pack('<BI4', LATE, o_step) end
    if o_identity ~= identity then return pack('<B', ELSEWHERE) .. text end
    if op == DRAW then return repeated(stepped_s, stepped_u, held) end
  elseif op == CANCEL then
    write_ended(CANCELLED, step, false)
    return reply(GRANTED, ns, nu), writes
  elseif op > SPEND and op ~= REPAIR then
    return pack('<B', UNKNOWN)
  end

  if op == REPAIR then
    load_buckets()
    local is_full = false
    each_limit(asked, function(level, b, row, name, units, amount, period, burst)
      local r = b.rows[row]
      if r then
        follow(b, r, amount, period, burst)
      else
        if b.n >= ROWS_MAX then make_room(b) end
        if b.n >= ROWS_MAX then is_full = true end
        r = new_row(row, amount, period, burst)
        insert(b, r)
      end
      local ds, du, dp = span(math.max(r[8] - units, 0), r[6], r[7])
      r[1], r[2], r[3] = plus(ns, nu, 0, ds, du, dp, r[6])
      b.changed = true
      read(level, name, 0, r)
    end)
    if is_full then return pack('<B', FULL) end
    write_buckets()
    write_ended(SETTLED, 0, false)
    return reply(GRANTED, ns, nu), writes
  end

  if op == DRAW or op == SPEND then
    due_s, due_u = ns + span_s, nu + span_u
    if due_u >= 1000000 then due_s, due_u = due_s + 1, due_u - 1000000 end
    local code = take(op == DRAW and due_s + 1 or ns, watched == 1)
    if code == FULL then return pack('<B', FULL) end
    if code == GRANTED and op == DRAW then
      write_open(0, ws, wu, due_s, due_u, on_expiry, asked, ARGV[text_at])
      due_at(due_s, due_u)
    elseif code == GRANTED then
      count(asked, ws)
      write_ended(SETTLED, 0, false)
    end
    return reply(code, ns, nu), writes
  end

  -- The lease is open.
  if due_s < ns or (due_s == ns and due_u <= nu) then
    digest = string.rep('\0', 8)
    if o_expiry == 0 then
      count(held, drawn_s)
    else
      local back = {}
      for i = 1, names do back[i] = held[i] == NONE and NONE or -held[i] end
      shift(back, false)
    end
    write_ended(EXPIRED, o_step, true)
    if op == EXPIRE then return reply(GRANTED, ns, nu), writes end
    return pack('<BB', ENDED, EXPIRED), writes
  elseif op == EXPIRE then
    return reply(REPEATED, ns, nu)
  elseif step < o_step or (step == o_step and (op == SETTLE or op == CANCEL)) then
    return pack('<BI4', LATE, o_step)
  elseif op == RENEW then
    local code = step == o_step and REPEATED or GRANTED
    if code == GRANTED then
      local s, u = ns + span_s, nu + span_u
      if u >= 1000000 then s, u = s + 1, u - 1000000 end
      if s > due_s or (s == due_s and u > due_u) then due_s, due_u = s, u end
      load_buckets()
      for level = 1, levels do
        local b = buckets[level]
        if b.n > 0 and due_s + 1 + REMEMBERED > b.expires then b.keep, b.changed = due_s + 1, true end
      end
      write_buckets()
      write_open(step, drawn_s, drawn_u, due_s, due_u, o_expiry, held, text)
      due_at(due_s, due_u)
      stepped_s, stepped_u = ns, nu
    end
    return pack('<Bdddd', code, stepped_s, stepped_u, due_s, due_u), writes
  elseif step == o_step then
    return repeated(stepped_s, stepped_u, held)
  elseif op == EXTEND then
    local code = take(due_s + 1, true)
    if code == FULL then return pack('<B', FULL) end
    if code == GRANTED then
      for i = 1, names do
        if asked[i] ~= NONE then held[i] = (held[i] == NONE and 0 or held[i]) + asked[i] end
      end
      write_open(step, drawn_s, drawn_u, due_s, due_u, o_expiry, held, text)
    end
    return reply(code, ns, nu), writes
  end

  local deltas = {}
  for i = 1, names do
    local has = held[i] == NONE and 0 or held[i]
    if op == CANCEL then
      deltas[i] = held[i] == NONE and NONE or -held[i]
    elseif asked[i] == NONE then
      -- A settle leaves limits that it does not name at what is held.
      deltas[i] = (op == SETTLE and held[i] ~= NONE) and 0 or NONE
    elseif op == SETTLE then
      deltas[i], held[i] = asked[i] - has, asked[i]
    else
      held[i] = math.max(has + asked[i], 0)
      deltas[i] = held[i] - has
    end
  end
  local is_moved = watched == 1
  for i = 1, names do is_moved = is_moved or (deltas[i] ~= NONE and deltas[i] ~= 0) end
  if is_moved then shift(deltas, watched == 1) end
  if op == ADJUST then
    write_open(step, drawn_s, drawn_u, due_s, due_u, o_expiry, held, text)
  else
    if op == SETTLE then count(held, drawn_s) end
    write_ended(op == SETTLE and SETTLED or CANCELLED, step, true)
  end
  return reply(GRANTED, ns, nu), writes
end

for i = 1, #left do
  local is_made, answer, writes = pcall(make, i)
  if not is_made then
    answer = pack('<B', FAILED) .. (type(answer) == 'table' and answer.err or 'ERR user_script: ' .. tostring(answer))
  elseif writes then
    if clock then call('SET', KEYS[1], clock) end
    clock = nil
    for j = 1, #writes do call(unpack(writes[j])) end
  end
  answers[#answers + 1] = pack('<HI4', 1, #answer)
  answers[#answers + 1] = answer
end
return table.concat(answers)
