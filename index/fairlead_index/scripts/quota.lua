-- Token buckets of a service's tenants, common to its routers. ARGV: the router's name, then for each tenant: its name, tokens a second, the most
-- that the bucket holds, tokens used since this router's last call. Answers how many routers there are, then what each bucket holds; below zero
-- where more was used than there was. `quota`: tenant -> level and time (ms); `routers`: router -> time (ms).
local p, now = KEYS[1], now_ms()
local QUIET, FORGET = 15000, 86400000
call('HSET', p .. 'routers', ARGV[1], now)
local routers = 0
local all = call('HGETALL', p .. 'routers')
for i = 1, #all, 2 do
  if now - tonumber(all[i + 1]) > QUIET then call('HDEL', p .. 'routers', all[i]) else routers = routers + 1 end
end
local answer = { routers }
for i = 2, #ARGV, 4 do
  local tenant, rate, most, used = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local level, at = most, now
  local record = call('HGET', p .. 'quota', tenant)
  if record then level, at = struct.unpack('<dd', record) end
  level = math.min(most, level + math.max(0, now - at) * rate / 1000) - used
  call('HSET', p .. 'quota', tenant, struct.pack('<dd', math.min(most, level), now))
  answer[#answer + 1] = string.format('%.3f', level)
end
call('PEXPIRE', p .. 'routers', FORGET)
call('PEXPIRE', p .. 'quota', FORGET)
return answer
