-- What every living worker holds of a prompt. ARGV: packed hashes. Returns {address, cached tokens, ...}; workers that hold nothing are left out.
local live = live_slots(KEYS[1], now_ms())
local depth = match(KEYS[1], ARGV[1], live, 65536)
local reply = {}
for slot, blocks in pairs(depth) do
  local w = read_live(live[slot])
  reply[#reply + 1] = w.address
  reply[#reply + 1] = blocks * w.bt
end
return reply
