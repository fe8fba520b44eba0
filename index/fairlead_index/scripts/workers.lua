-- Returns every live worker as a flat list, 18 fields each, numbers as strings.
local p, now, reply = KEYS[1], now_ms(), {}
local all = call('HGETALL', p .. 'live')
for i = 1, #all, 2 do
  local slot, w = all[i], read_live(all[i + 1])
  local row = { w.pod, w.address, w.bt, w.revision, (w.lease - now) / 1000, call('HGET', p .. 'r:owed', slot) or 0, w.running, w.waiting, w.backlog,
                w.rate, w.step, w.free, w.total, w.page, w.arrivals, w.at > 0 and (now - w.at) / 1000 or 0, slot_number(slot), w.epoch }
  if in_force(w.lease, w.lease_ms, now) then
    -- No `tostring`: it asks the metatable of strings, which an older server lets any user change (CVE-2025-46818).
    for _, field in ipairs(row) do reply[#reply + 1] = type(field) == 'string' and field or string.format('%.14g', field) end
  end
end
return reply
