-- Renews a lease and reports the load. ARGV: slot, epoch, sequence, age of the load in ms (-1: no load yet), running, waiting, backlog tokens,
-- prefill rate, step seconds, pages free, pages total, page size. Returns {'OK', slots to sweep}, {'STALE'} or {'GAP', n}.
local p, slot = KEYS[1], ARGV[1]
local at = sequence(p, slot, ARGV[2])
local record = call('HGET', p .. 'live', slot)
if not at or not record then return { 'STALE' } end
if call('HDEL', p .. 'r:recall', slot) == 1 then  -- a router found the index wrong about it
  kill(p, slot)
  return { 'STALE' }
end
if at ~= tonumber(ARGV[3]) then return { 'GAP', at } end
local now, age, w = now_ms(), tonumber(ARGV[4]), read_live(record)
w.lease = now + w.lease_ms
if age >= 0 then
  w.at = now - age
  w.running, w.waiting, w.backlog, w.rate = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
  w.step, w.free, w.total, w.page = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
end
call('HSET', p .. 'live', slot, pack_live(w))
set_lease(p, slot, w.lease)

-- Promises that the worker has had time to receive are in its backlog, or done: they count no longer. The others run out after a minute, and so do
-- those of a clock that was ahead.
local ARRIVAL, LONGEST = 250, 60000
local promises = p .. 'r:' .. slot
local before = now - LONGEST
if w.at > 0 and w.at - ARRIVAL > before then before = w.at - ARRIVAL end
local owed = 0
if call('ZREMRANGEBYSCORE', promises, '-inf', before) + call('ZREMRANGEBYSCORE', promises, now + LONGEST, '+inf') > 0 then
  for _, promise in ipairs(call('ZRANGE', promises, 0, -1)) do owed = owed + struct.unpack('<d', promise, 9) end
  if owed > 0 then
    call('HSET', p .. 'r:owed', slot, owed)
    call('EXPIRE', p .. 'r:owed', KEPT)
  else
    call('HDEL', p .. 'r:owed', slot)
  end
else
  owed = tonumber(call('HGET', p .. 'r:owed', slot) or 0)
end
local rate = rate_of(w.rate)
set_ready(p, slot, math.max(now, w.at + 1000 * w.backlog / rate) + 1000 * (owed / rate + w.step), rate, w.step, room_of(w.free, w.total, w.page))
return { 'OK', call('ZCARD', p .. 'dead') + call('ZCARD', p .. 'sweeping') }
