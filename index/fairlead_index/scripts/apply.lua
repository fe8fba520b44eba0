-- One batch of a slot's changes, in order, at once. ARGV: slot, epoch, sequence, then pairs of 'S' (stored) or 'R' (removed) and packed hashes.
-- Returns {'OK'}; {'STALE'}: that incarnation is over; {'GAP', n}: the index stands at n, so changes are lost. A batch sent twice counts once.
local p, slot, seq = KEYS[1], ARGV[1], tonumber(ARGV[3])
local at = sequence(p, slot, ARGV[2])
if not at then return { 'STALE' } end
if at == seq then return { 'OK' } end
if at + 1 ~= seq then return { 'GAP', at } end
local number, buckets = slot_number(slot), buckets_of(p)

local function store(key, hash)
  local packed = call('HGET', key, hash)
  if not packed then
    call('HSET', key, hash, slot)
    if call('HLEN', key) == 1 then call('EXPIRE', key, KEPT) end
  elseif packed == WIDE then
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
  elseif packed == WIDE then
    local wide = p .. 'w' .. hash
    call('SETBIT', wide, number, 0)
    if call('BITCOUNT', wide) == 0 then
      call('DEL', wide)
      call('HDEL', key, hash)
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

local told = { 'A' .. slot }
for i = 4, #ARGV, 2 do
  local change, hashes = ARGV[i] == 'S' and store or remove, ARGV[i + 1]
  for o = 1, #hashes, 8 do
    change(bucket_key(p, buckets, hashes, o), sub(hashes, o, o + 7))
  end
  told[#told + 1] = ARGV[i] .. struct.pack('<I4', #hashes / 8) .. hashes
end
tell(p, table.concat(told))
call('HSET', p .. 'fence', slot, struct.pack(FENCE, ARGV[2], seq))
return { 'OK' }
