-- What every living worker holds of a prompt. ARGV: packed hashes. Returns {address, cached tokens, ...}; workers that hold nothing are left out.
local p = KEYS[1]
local depth, numbers = match(p, ARGV[1], living(p, now_ms()), 65536)
local slots, reply, size = {}, {}, 0
for i = 1, #numbers do slots[i] = pack_slot(numbers[i]) end
for from = 1, #slots, 1000 do  -- Lua's `unpack` takes no more than a few thousand at once
  local to = math.min(from + 999, #slots)
  local cards = call('HMGET', p .. 'live', unpack(slots, from, to))
  for i = from, to do
    local bt, address = struct.unpack(CARD, cards[i - from + 1], 9)  -- behind the lease
    reply[size + 1], reply[size + 2] = address, depth[numbers[i]] * bt
    size = size + 2
  end
end
return reply
