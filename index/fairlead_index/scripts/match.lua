-- Returns what every live worker holds of a prompt. ARGV: packed hashes. Returns {HOLDER, ...}, packed: cached tokens (8 bytes),
-- epoch (8 bytes), address. Workers that hold nothing are absent.
local p, now = KEYS[1], now_ms()
local depth, numbers = match(p, ARGV[1], living(p, now), 65536, 65536, nil)
local slots, reply, size = {}, {}, 0
local fields, pack, format = struct.unpack, struct.pack, '<d' .. sub(CARD, 2)
for i = 1, #numbers do
  local low = numbers[i] % 256
  slots[i] = char((numbers[i] - low) / 256, low)  -- `pack_slot`
end
for from = 1, #slots, 1000 do  -- Lua's `unpack` takes no more than a few thousand at once
  local to = math.min(from + 999, #slots)
  local cards = call('HMGET', p .. 'live', unpack(slots, from, to))
  for i = from, to do
    local card = cards[i - from + 1]
    if card then
      local lease, lease_ms, epoch, bt, address = fields(format, card)
      if lease > now and lease <= now + lease_ms then  -- `in_force`
        size = size + 1
        reply[size] = pack('<i8c8c0', depth[numbers[i]] * bt, epoch, address)
      end
    end
  end
end
return reply
