-- What one router has promised and taken back since it last called, and what the others did meanwhile: for routers that choose by themselves.
-- ARGV: router (8 bytes), position heard last ('' for none), then '+' or '-' before a reservation (slot, id of 8 bytes, cost as a double) each.
-- Returns {position, changes of the others...}: of each record of theirs its changes, 19 bytes each.
local p, router, heard = KEYS[1], ARGV[1], ARGV[2]
local RECORDS, SECONDS = 1024, 60  -- how many, and for how long: a router that missed some looks at `r:owed` anyway
local claims, now = p .. 'r:claims', now_ms()

local reply = { heard }
local records = heard == '' and call('XREVRANGE', claims, '+', '-', 'COUNT', 1) or call('XRANGE', claims, '(' .. heard, '+')
for _, record in ipairs(records) do
  reply[1] = record[1]
  if heard ~= '' and record[2][2] ~= router then reply[#reply + 1] = record[2][4] end
end

-- Only what changed is told: a call may be repeated, and the slot may have ended.
local function change(text)
  local slot, promise = sub(text, 2, 3), sub(text, 4)
  local cost = struct.unpack('<d', promise, 9)
  if sub(text, 1, 1) == '+' then
    local record = call('HGET', p .. 'live', slot)
    if not record or call('ZADD', p .. 'r:' .. slot, now, promise) == 0 then return false end
    local _, _, _, _, rate = struct.unpack(LOAD, record, #record - 71)
    call('EXPIRE', p .. 'r:' .. slot, KEPT)
    call('HINCRBYFLOAT', p .. 'r:owed', slot, cost)
    call('EXPIRE', p .. 'r:owed', KEPT)
    call('ZINCRBY', p .. 'r:ready', 1000 * cost / rate_of(rate), slot)  -- not taken back: by then it was worked off, or a heartbeat says so
  else
    if call('ZREM', p .. 'r:' .. slot, promise) == 0 then return false end
    if tonumber(call('HINCRBYFLOAT', p .. 'r:owed', slot, -cost)) < 0.5 then call('HDEL', p .. 'r:owed', slot) end
  end
  return true
end
local told = {}
for i = 3, #ARGV do
  if change(ARGV[i]) then told[#told + 1] = ARGV[i] end
end
if #told > 0 then
  reply[1] = call('XADD', claims, 'MAXLEN', '~', RECORDS, '*', 'f', router, 'c', table.concat(told))
  call('EXPIRE', claims, SECONDS)
end
if reply[1] == '' then reply[1] = '0-0' end
return reply
