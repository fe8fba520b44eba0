-- Every living worker. Returns a flat list, 16 fields each, numbers as strings.
local p, now, reply = KEYS[1], now_ms(), {}
for slot, record in pairs(live_slots(p, now)) do
  local w = read_live(record)
  local row = { w.pod, w.address, w.bt, w.revision, (w.lease - now) / 1000, call('HGET', p .. 'owed', slot) or 0, w.running, w.waiting, w.backlog,
                w.rate, w.step, w.free, w.total, w.page, w.at > 0 and (now - w.at) / 1000 or 0, slot_number(slot) }
  for _, field in ipairs(row) do reply[#reply + 1] = tostring(field) end
end
return reply
