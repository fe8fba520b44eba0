-- Updates the token buckets of a service's tenants, shared by its routers. ARGV: the router's name, the number of this call (a call whose reply was lost is sent
-- again under its number, and charges once), then for each tenant: its name, tokens a second, the most that the bucket holds, tokens used since the
-- router's last call. Returns the number of routers, then each bucket's level: below zero if more was used than it held.
-- `q:tenants`: tenant -> level and time (ms); `q:routers`: router -> time (ms) and number.
local p, now = KEYS[1], now_ms()
local QUIET, FORGET = 15000, 86400000
local before = call('HGET', p .. 'q:routers', ARGV[1])
local is_charged = before and string.match(before, ' (.*)') == ARGV[2]
call('HSET', p .. 'q:routers', ARGV[1], string.format('%d %s', now, ARGV[2]))
local routers = 0
local all = call('HGETALL', p .. 'q:routers')
for i = 1, #all, 2 do
  if now - tonumber(string.match(all[i + 1], '^%d+')) > QUIET then call('HDEL', p .. 'q:routers', all[i]) else routers = routers + 1 end
end
local answer = { routers }
for i = 3, #ARGV, 4 do
  local tenant, rate, most, used = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), is_charged and 0 or tonumber(ARGV[i + 3])
  local level, at = most, now
  local record = call('HGET', p .. 'q:tenants', tenant)
  if record then level, at = struct.unpack('<dd', record) end
  level = math.min(most, level + math.max(0, now - at) * rate / 1000) - used
  call('HSET', p .. 'q:tenants', tenant, struct.pack('<dd', math.min(most, level), now))
  answer[#answer + 1] = string.format('%.3f', level)
end
call('PEXPIRE', p .. 'q:routers', FORGET)
call('PEXPIRE', p .. 'q:tenants', FORGET)
return answer
