-- Renews expiries: every key expires a day after a worker last renewed it. Each call renews all keys except buckets, and a share of the buckets, so
-- that all buckets are renewed within a few hours with any number of workers. No ARGV. Returns {'OK'}.
local p = KEYS[1]
local PASS, MOST = 4 * 3600 * 1000, 64  -- ms in which all buckets are renewed; buckets per call: half a millisecond or less

local fixed = { 'meta', 'live', 'leases', 'log', 'names', 'dead', 'sweeping', 'free', 'r:owed' }
for _, name in ipairs(fixed) do call('EXPIRE', p .. name, KEPT) end

local buckets, now = buckets_of(p).count, now_ms()
if buckets == 0 then return { 'OK' } end
local last, cursor = unpack(call('HMGET', p .. 'meta', 'renewed', 'renewing'))
local share = math.min(MOST, buckets, math.ceil(buckets * (now - tonumber(last or 0)) / PASS))
cursor = tonumber(cursor or 0)
for _ = 1, share do
  local key = bucket_named(p, cursor)
  if call('EXPIRE', key, KEPT) == 1 then
    local entries = call('HGETALL', key)
    for i = 1, #entries, 2 do
      if byte(entries[i + 1]) >= WIDE then call('EXPIRE', p .. 'w' .. entries[i], KEPT) end
    end
  end
  cursor = (cursor + 1) % buckets
end
call('HSET', p .. 'meta', 'renewed', now, 'renewing', cursor)
return { 'OK' }
