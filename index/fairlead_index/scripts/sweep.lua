-- Sweeps a bounded part of the buckets. ARGV: entries to visit. Returns {slots still to clean}.
-- A pass takes the slots that are dead at its start, visits every bucket once, then frees them. Slots that die meanwhile wait for the next pass.
local p, budget = KEYS[1], tonumber(ARGV[1])
local SILENT = 60000  -- ms past its lease, after which an incarnation is ended

local now = now_ms()
if math.abs(now - tonumber(call('HGET', p .. 'meta', 'reaped') or 0)) > 1000 then  -- a clock may go back
  call('HSET', p .. 'meta', 'reaped', now)
  local all = call('HGETALL', p .. 'live')
  for i = 1, #all, 2 do
    if struct.unpack('<d', all[i + 1]) + SILENT < now then kill(p, all[i]) end
  end
end

local buckets = buckets_of(p).count
local cursor = tonumber(call('HGET', p .. 'meta', 'cursor') or 0)
if call('ZCARD', p .. 'sweeping') == 0 then
  if buckets == 0 or call('ZCARD', p .. 'dead') == 0 then return { 0 } end
  call('RENAME', p .. 'dead', p .. 'sweeping')
  cursor = 0
end
local dead, numbers, gone = {}, {}, 0
for _, slot in ipairs(call('ZRANGE', p .. 'sweeping', 0, -1)) do
  dead[slot] = true
  numbers[#numbers + 1] = slot_number(slot)
end

-- Returns whether a record has only dead holders.
local function orphaned_wide(name)
  local wide = p .. 'w' .. name
  local map = call('GET', wide) or ''
  local kept, from = {}, 1
  for _, n in ipairs(numbers) do  -- in order
    if (byte(map, n + 1) or 0) > 0 then
      kept[#kept + 1] = sub(map, from, n)
      from = n + 2
    end
  end
  if from > 1 then call('SETRANGE', wide, 0, table.concat(kept, '\0') .. '\0' .. sub(map, from)) end
  if call('BITCOUNT', wide) > 0 then return false end
  call('DEL', wide)
  return true
end

local function orphaned(key, name, record)
  local _, wide, first = parts_of(record)
  if wide then return orphaned_wide(name) end
  local kept = {}
  for at = first, #record, 3 do
    if not dead[sub(record, at, at + 1)] then kept[#kept + 1] = sub(record, at, at + 2) end
  end
  if #kept > 0 and #kept * 3 < #record - first + 1 then call('HSET', key, name, sub(record, 1, first - 1) .. table.concat(kept)) end
  return #kept == 0
end

while budget > 0 and cursor < buckets do
  local key = bucket_named(p, cursor)
  local entries, orphans = call('HGETALL', key), {}
  for i = 1, #entries, 2 do
    if orphaned(key, entries[i], entries[i + 1]) then orphans[#orphans + 1] = entries[i] end
  end
  for first = 1, #orphans, 1000 do
    gone = gone + call('HDEL', key, unpack(orphans, first, math.min(first + 999, #orphans)))
  end
  cursor = cursor + 1
  budget = budget - 1 - #entries / 2
end
call('HSET', p .. 'meta', 'cursor', cursor)
if gone > 0 then call('HINCRBY', p .. 'meta', 'runs', -gone) end
if cursor >= buckets then
  for slot in pairs(dead) do call('ZADD', p .. 'free', slot_number(slot), slot) end
  call('EXPIRE', p .. 'free', KEPT)
  call('DEL', p .. 'sweeping')
end
return { call('ZCARD', p .. 'dead') + call('ZCARD', p .. 'sweeping') }
