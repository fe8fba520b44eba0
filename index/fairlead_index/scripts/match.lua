-- What every living worker holds of a prompt. ARGV: packed hashes. Returns {address, cached tokens, ...}; workers that hold nothing are left out.
local live = live_slots(KEYS[1], now_ms())
local depth = match(KEYS[1], ARGV[1], live, 65536)
local reply = {}
for slot, blocks in pairs(depth) do
  local _, bt, address = struct.unpack(LIVE_HEAD, live[slot])
  reply[#reply + 1] = address
  reply[#reply + 1] = blocks * bt
end
return reply
