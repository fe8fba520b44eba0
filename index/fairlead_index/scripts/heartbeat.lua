-- Renews a lease and reports the load. ARGV: slot, epoch, sequence, age of the load in ms (-1: no load yet), running, waiting, backlog tokens,
-- prefill rate, step seconds, pages free, pages total, page size, requests a second. Returns {'OK', slots to sweep}, {'STALE'} or {'GAP', n}.
local p, slot = KEYS[1], ARGV[1]
local done = sequence(p, slot, ARGV[2])
local record = call('HGET', p .. 'live', slot)
if not done or not record then return { 'STALE' } end
if call('HDEL', p .. 'r:recall', slot) == 1 then  -- a router found the index wrong about this worker
  kill(p, slot)
  return { 'STALE' }
end
if done ~= tonumber(ARGV[3]) then return { 'GAP', done } end
local now, age = now_ms(), tonumber(ARGV[4])
local _, lease_ms = struct.unpack('<dd', record)
local load = sub(record, -LOAD_BYTES)  -- the load time and the load
if age >= 0 then load = struct.pack(LOAD, now - age, unpack(ARGV, 5, 13)) end
call('HSET', p .. 'live', slot, struct.pack('<d', now + lease_ms) .. sub(record, 9, -LOAD_BYTES - 1) .. load)
set_lease(p, slot, now + lease_ms)
local at = struct.unpack('<d', load)

-- Reservations that the worker has had time to receive are in its backlog or done, so they no longer count. The others expire after a minute, as do
-- those from a clock that was ahead.
local ARRIVAL, LONGEST = 250, 60000
local reservations = p .. 'r:' .. slot
local before = now - LONGEST
if at > 0 and at - ARRIVAL > before then before = at - ARRIVAL end
if call('ZREMRANGEBYSCORE', reservations, '-inf', before) + call('ZREMRANGEBYSCORE', reservations, now + LONGEST, '+inf') > 0 then
  local owed = 0
  for _, reservation in ipairs(call('ZRANGE', reservations, 0, -1)) do owed = owed + struct.unpack('<d', reservation, 9) end
  if owed > 0 then
    call('HSET', p .. 'r:owed', slot, owed)
    call('EXPIRE', p .. 'r:owed', KEPT)
  else
    call('HDEL', p .. 'r:owed', slot)
  end
end
return { 'OK', call('ZCARD', p .. 'dead') + call('ZCARD', p .. 'sweeping') }
