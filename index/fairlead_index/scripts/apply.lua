-- One batch of a slot's changes, in order, at once. ARGV: slot, epoch, sequence, then pairs of 'S' (stored) or 'R' (removed) and packed hashes.
-- Returns {'OK'}; {'STALE'}: that incarnation is over; {'GAP', n}: the index stands at n, so changes are lost. A batch sent twice counts once.
local p, slot, seq = KEYS[1], ARGV[1], tonumber(ARGV[3])
local at = sequence(p, slot, ARGV[2])
if not at then return { 'STALE' } end
if at == seq then return { 'OK' } end
if at + 1 ~= seq then return { 'GAP', at } end
local state = call('HMGET', p .. 'meta', 'logged', 'mirrored', 'told', 'buckets', 'blocks')
local buckets, blocks = state[4], state[5]
local number, grid = slot_number(slot), grid_of(tonumber(buckets or 0))
blocks = tonumber(blocks or 0)
-- With fewer blocks some buckets may be empty, and what a block makes anew needs to expire. With more, one in e^20 or so is: `renew` gives it
-- its time within hours, as it does to every bucket.
local sparse = grid.count * FILL / 2

local function store(key, hash)
  if call('HSETNX', key, hash, slot) == 1 then  -- most blocks are held by one worker
    blocks = blocks + 1
    if blocks <= sparse and call('HLEN', key) == 1 then call('EXPIRE', key, KEPT) end
    return
  end
  local packed = call('HGET', key, hash)
  if packed == WIDE then
    call('SETBIT', p .. 'w' .. hash, number, 1)
  else
    for i = 1, #packed, 2 do
      if sub(packed, i, i + 1) == slot then return end
    end
    if #packed < NARROW * 2 then
      call('HSET', key, hash, packed .. slot)
    else
      local wide = p .. 'w' .. hash
      for i = 1, #packed, 2 do call('SETBIT', wide, slot_number(sub(packed, i, i + 1)), 1) end
      call('SETBIT', wide, number, 1)
      call('EXPIRE', wide, KEPT)
      call('HSET', key, hash, WIDE)
    end
  end
end

local function remove(key, hash)
  local packed = call('HGET', key, hash)
  if not packed then return end
  if packed == slot then
    call('HDEL', key, hash)
    blocks = blocks - 1
  elseif packed == WIDE then
    local wide = p .. 'w' .. hash
    call('SETBIT', wide, number, 0)
    if call('BITCOUNT', wide) == 0 then
      call('DEL', wide)
      call('HDEL', key, hash)
      blocks = blocks - 1
    end
  else
    for i = 1, #packed, 2 do
      if sub(packed, i, i + 1) == slot then
        call('HSET', key, hash, sub(packed, 1, i - 1) .. sub(packed, i + 2))
        return
      end
    end
  end
end

-- Splits the next bucket: what of it belongs to the new one, moves there.
local function split()
  local count, whole, n = grid.count, grid.whole, 0
  local from, to = bucket_named(p, count - grid.half), bucket_named(p, count)
  local entries, moved, gone = call('HGETALL', from), {}, {}
  for i = 1, #entries, 2 do
    local hash = entries[i]
    local a, b, c = byte(hash, 1, 3)
    if (c * 65536 + b * 256 + a) % whole == count then
      n = n + 1
      gone[n], moved[2 * n - 1], moved[2 * n] = hash, hash, entries[i + 1]
    end
  end
  for first = 1, #gone, 1000 do  -- Lua's `unpack` takes no more than a few thousand at once
    local last = math.min(first + 999, #gone)
    call('HSET', to, unpack(moved, 2 * first - 1, 2 * last))
    call('HDEL', from, unpack(gone, first, last))
  end
  call('EXPIRE', to, KEPT)
  grid = grid_of(count + 1)
end

local told, mirrored = { 'A' .. slot }, is_mirrored(state)
for i = 4, #ARGV, 2 do
  local change, hashes = ARGV[i] == 'S' and store or remove, ARGV[i + 1]
  for o = 1, #hashes, 8 do
    change(bucket_key(p, grid, hashes, o), sub(hashes, o, o + 7))
  end
  if mirrored then told[#told + 1] = ARGV[i] .. struct.pack('<I4', #hashes / 8) .. hashes end
end
local most = grid.count + SPLITS
while blocks > grid.count * FILL and grid.count < most do split() end
tell(p, state, table.concat(told), 'blocks', blocks, 'buckets', grid.count)
call('HSET', p .. 'fence', slot, struct.pack(FENCE, ARGV[2], seq))
return { 'OK' }
