-- Stores an encrypted response of a tenant. ARGV: its name, the tenant's tag, the text, seconds until it expires, most responses of a tenant, most bytes of a
-- tenant, most bytes of all tenants. Returns {'OK'}; {'FULL'}: there is no room. Only the tenant's own responses make room, the oldest first.
-- A tenant may have an equal share of all bytes, counted with one more tenant: one that stores again shrinks to it.
local p, tag, name, text, time = KEYS[1], ARGV[2], ARGV[1], ARGV[3], call('TIME')
local now = time[1] * 1000000 + time[2]  -- microseconds: the order of two responses is that of their scores
local seconds, most, most_bytes, all_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local bytes, all, own, record = p .. 'answers:bytes', p .. 'answers:all', p .. 'answers:t' .. tag, p .. 'answers:r' .. name
call('HINCRBY', bytes, '', 0)  -- a full server refuses the script before it has changed anything
local EXPIRED = 64             -- expired responses that one call takes off the accounts
for _, member in ipairs(call('ZRANGE', all, '-inf', now, 'BYSCORE', 'LIMIT', 0, EXPIRED)) do drop_response(p, member) end
local before = call('HGET', record, 'member')  -- a request that was repeated at another worker
if before then drop_response(p, before) end
local size = #text
local shares = call('HLEN', bytes) + (call('HGET', bytes, tag) and 0 or 1)  -- the field '' stands for the tenant to come
local share = math.min(most_bytes, floor(all_bytes / shares))
if size > share then return { 'FULL' } end
while call('ZCARD', own) >= most or tonumber(call('HGET', bytes, tag) or 0) + size > share
  or tonumber(call('HGET', bytes, '') or 0) + size > all_bytes do
  local oldest = call('ZPOPMIN', own)[1]
  if not oldest then return { 'FULL' } end
  drop_response(p, oldest)
end
local member, ends = tag .. ' ' .. name .. ' ' .. size, now + 1000000 * seconds
call('HSET', record, 'member', member, 'text', text)
call('ZADD', all, ends, member)
call('ZADD', own, ends, member)
call('HINCRBY', bytes, tag, size)
call('HINCRBY', bytes, '', size)
for _, key in ipairs({ record, all, own, bytes }) do call('EXPIRE', key, seconds) end
return { 'OK' }
