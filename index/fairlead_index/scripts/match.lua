-- Returns what live workers hold of a prompt. ARGV: packed hashes; of a large fleet also: most holders to find, packed slots to find in any case, packed
-- slots to leave out. Without these, all holders. Returns {HOLDER, ...}, deepest first, packed: cached tokens (8 bytes), epoch (8 bytes), address.
-- Workers that hold nothing are absent.
local LEVELS = 8         -- distinct depths with a limit; shallower holders count as holders of the first run, as far as they hold it
local p, now = KEYS[1], now_ms()
local lives, limit, included = living(p, now), tonumber(ARGV[2]), nil
if limit then
  included = {}
  for i = 1, #ARGV[4], 2 do lives[slot_number(sub(ARGV[4], i, i + 1))] = false end
  for i = 1, #ARGV[3], 2 do
    local n = slot_number(sub(ARGV[3], i, i + 1))
    if lives[n] then included[#included + 1] = n end
  end
end
local depth, numbers = match(p, ARGV[1], lives, limit and LEVELS or 65536, limit or 65536, included)
if limit and #numbers > limit then
  local kept, listed = {}, {}
  for i = 1, limit do kept[i], listed[numbers[i]] = numbers[i], true end
  for i = 1, #included do
    local n = included[i]
    if depth[n] and not listed[n] then kept[#kept + 1] = n end
  end
  numbers = kept
end
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
