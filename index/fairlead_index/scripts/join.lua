-- Adds an incarnation: a fresh slot under a lease, at sequence 0. Ends any older one of the same pod or address.
-- ARGV: pod, address, revision, block tokens, epoch (8 random bytes), lease ms, buckets of a new namespace. Returns {'OK', slot} or {'FULL'}.
local p = KEYS[1]
local pod, address, revision, epoch, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[5], tonumber(ARGV[6])
call('HSETNX', p .. 'meta', 'buckets', ARGV[7])
call('HSETNX', p .. 'meta', 'birth', epoch)
call('EXPIRE', p .. 'meta', KEPT)
for _, name in ipairs({ 'p' .. pod, 'a' .. address }) do
  local old = call('HGET', p .. 'names', name)
  if old then kill(p, old) end
end
local free = call('ZPOPMIN', p .. 'free')  -- low numbers first: short strings
local slot = free[1]
if not slot then
  local top = tonumber(call('HGET', p .. 'meta', 'top') or 0)
  if top >= 65535 then return { 'FULL' } end
  call('HSET', p .. 'meta', 'top', top + 1)
  slot = pack_slot(top + 1)
end
call('HSET', p .. 'names', 'p' .. pod, slot, 'a' .. address, slot)
call('HSET', p .. 'meta', 'f' .. slot, struct.pack(FENCE, epoch, 0))
local now = now_ms()
local ends = now + lease
set_lease(p, slot, ends)
call('HSET', p .. 'live', slot, pack_live({ lease = ends, at = 0, running = 0, waiting = 0, backlog = 0, rate = 0, step = 0, free = 0,
  total = 0, page = 0, arrivals = 0, epoch = epoch, bt = tonumber(ARGV[4]), lease_ms = lease, address = address, pod = pod, revision = revision }))
announce(p, 'J' .. slot .. struct.pack(CARD, lease, epoch, tonumber(ARGV[4]), #address, address))
for _, name in ipairs({ 'live', 'leases', 'log', 'names' }) do call('EXPIRE', p .. name, KEPT) end
return { 'OK', slot }
