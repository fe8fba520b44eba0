-- Recalls a worker about whose blocks the index is wrong. The worker's next heartbeat ends its incarnation, so it joins again with a snapshot.
-- ARGV: address. Returns {'OK'}; {'LATER'}: too soon after another recall; {'UNKNOWN'}: not live, or recalled already.
-- For all routers together: one worker per 5 s, and the same worker after a minute, which doubles up to an hour while recalls do not help.
local p, address = KEYS[1], ARGV[1]
local APART, FIRST, LONGEST = 5000, 60000, 3600000

local slot = call('HGET', p .. 'names', 'a' .. address)
if not slot then return { 'UNKNOWN' } end
local now, any, own = now_ms(), p .. 'r:recalled', p .. 'r:recalled:' .. address
if call('EXISTS', any) == 1 then return { 'LATER' } end
local wait = FIRST
local before = call('GET', own)
if before then
  local at, waited = struct.unpack('<dd', before)
  if now >= at and now - at < waited then return { 'LATER' } end
  wait = math.min(LONGEST, waited * 2)
end

if call('HEXISTS', p .. 'live', slot) == 0 or call('HSETNX', p .. 'r:recall', slot, now) == 0 then return { 'UNKNOWN' } end
call('EXPIRE', p .. 'r:recall', KEPT)
call('SET', any, address, 'PX', APART)
call('SET', own, struct.pack('<dd', now, wait), 'PX', 4 * wait)
return { 'OK' }
