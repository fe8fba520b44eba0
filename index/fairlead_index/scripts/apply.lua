-- Applies one batch of a slot's changes, in order and atomically. ARGV: slot, epoch, sequence, then changes, each along one run: 'S' or 'R', how many blocks before
-- the first that changes (a byte), and the packed hashes of the run from its first block on. 'S': the slot now holds all of them. 'R': it
-- holds only those before the first that changes. Returns {'OK'}; {'STALE'}: the incarnation has ended; {'GAP', n}: the index is at sequence n, so
-- changes were lost. A batch sent twice counts once.
local p, slot, seq = KEYS[1], ARGV[1], tonumber(ARGV[3])
local state = call('HMGET', p .. 'meta', 'logged', 'told', 'logging', 'buckets', 'runs', 'f' .. slot)
local at = sequence_in(state[6], ARGV[2])
if not at then return { 'STALE' } end
if at == seq then return { 'OK' } end
if at + 1 ~= seq then return { 'GAP', at } end
local grid, runs = grid_of(tonumber(state[4] or 0)), tonumber(state[5] or 0)

-- Adds the slot as holder of `path`, packed hashes, from block `first` (counted from 0) to its end. `known`: a record probably exists.
local function store(path, first, known)
  local name, rest = sub(path, first * 8 + 1, first * 8 + 8), sub(path, first * 8 + 9)
  local key, behind = bucket_key(p, grid, name, 1), #rest / 8
  local record = known and call('HGET', key, name)
  if not record then
    if call('HSETNX', key, name, char(behind) .. rest .. slot .. char(behind + 1)) == 1 then  -- most runs are held by one worker
      runs = runs + 1
      if call('HLEN', key) == 1 then call('EXPIRE', key, KEPT) end
      return
    end
    record = call('HGET', key, name)
  end
  local there, wide, holders = parts_of(record)
  local shared = common(record, there, rest)
  local parted = shared <= behind and shared <= there
  local held = parted and shared or behind + 1
  local grown = behind > there and not parted
  local blocks = grown and rest or sub(record, 2, 1 + 8 * there)
  if wide then
    local map, number = p .. 'w' .. name, slot_number(slot)
    if grown then call('HSET', key, name, char(WIDE + behind) .. blocks) end
    if (byte(call('GET', map) or '', number + 1) or 0) < held then call('SETRANGE', map, number, char(held)) end
  else
    local found
    for i = holders, #record, 3 do
      if sub(record, i, i + 1) == slot then found = i break end
    end
    if not found or grown or byte(record, found + 2) < held then
      local others = sub(record, holders)
      if found then
        held = math.max(held, byte(record, found + 2))
        others = sub(record, holders, found - 1) .. sub(record, found + 3)
      end
      local value = char(#blocks / 8) .. blocks .. others .. slot .. char(held)
      if #value > NARROW then
        local map = p .. 'w' .. name
        for i = 2 + #blocks, #value, 3 do
          call('SETRANGE', map, slot_number(sub(value, i, i + 1)), sub(value, i + 2, i + 2))
        end
        call('EXPIRE', map, KEPT)
        value = char(WIDE + #blocks / 8) .. blocks
      end
      call('HSET', key, name, value)
    end
  end
  if parted then store(path, first + shared, false) end
end

-- Removes the slot as holder of `path` from block `last` on. `first`: the block that names the record.
local function remove(path, first, last)
  local name, rest = sub(path, first * 8 + 1, first * 8 + 8), sub(path, first * 8 + 9)
  local key = bucket_key(p, grid, name, 1)
  local record = call('HGET', key, name)
  if not record then return end
  local there, wide, holders = parts_of(record)
  local shared, left = common(record, there, rest), last - first
  if shared <= #rest / 8 and shared <= there then remove(path, first + shared, math.max(last, first + shared)) end
  if left >= shared then return end
  if wide then
    local map, number = p .. 'w' .. name, slot_number(slot)
    if (byte(call('GET', map) or '', number + 1) or 0) <= left then return end
    call('SETRANGE', map, number, char(left))
    if left > 0 or call('BITCOUNT', map) > 0 then return end
    call('DEL', map)
  else
    local found
    for i = holders, #record, 3 do
      if sub(record, i, i + 1) == slot then found = i break end
    end
    if not found or byte(record, found + 2) <= left then return end
    if left > 0 then
      call('HSET', key, name, sub(record, 1, found + 1) .. char(left) .. sub(record, found + 3))
      return
    elseif #record > holders + 2 then
      call('HSET', key, name, sub(record, 1, found - 1) .. sub(record, found + 3))
      return
    end
  end
  call('HDEL', key, name)
  runs = runs - 1
end

-- Splits the next bucket: entries that belong to the new bucket move there.
local function split()
  local count, whole, n = grid.count, grid.whole, 0
  local from, to = bucket_named(p, count - grid.half), bucket_named(p, count)
  local entries, moved, gone = call('HGETALL', from), {}, {}
  for i = 1, #entries, 2 do
    local name = entries[i]
    local a, b, c = byte(name, 1, 3)
    if (c * 65536 + b * 256 + a) % whole == count then
      n = n + 1
      gone[n], moved[2 * n - 1], moved[2 * n] = name, name, entries[i + 1]
    end
  end
  for first = 1, #gone, 1000 do  -- Lua's `unpack` takes no more than a few thousand at once
    local last = math.min(first + 999, #gone)
    call('HSET', to, unpack(moved, 2 * first - 1, 2 * last))
    call('HDEL', from, unpack(gone, first, last))
  end
  call('EXPIRE', to, KEPT)
  call('HSET', p .. 'meta', 'buckets', count + 1)
  grid = grid_of(count + 1)
end

local mirrored = is_mirrored(p)
local log_record = mirrored and { 'A' .. slot }
local STORED = byte('S')
for i = 4, #ARGV do
  local change = ARGV[i]
  local kind, before = byte(change, 1, 2)
  local path = sub(change, 3)
  if kind == STORED then store(path, 0, before > 0) else remove(path, 0, before) end
  if mirrored then log_record[#log_record + 1] = char(kind) .. struct.pack('<I4', #path / 8 - before) .. sub(path, before * 8 + 1) end
end
local most = grid.count + SPLITS
while runs > grid.count * FILL and grid.count < most do split() end
log_change(p, state, mirrored, mirrored and table.concat(log_record), 'runs', runs, 'f' .. slot, struct.pack(FENCE, ARGV[2], seq))
return { 'OK' }
