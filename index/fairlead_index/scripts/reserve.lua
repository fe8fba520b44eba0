-- Publishes one router's reservations and releases since its last call, and returns those of the other routers.
-- ARGV: router (8 bytes), its last position in `r:changes` ('' for none), then '+' or '-' before a reservation (slot, id of 8 bytes, cost as a double) each.
-- Returns {position, changes of the others...}: of each record of theirs its changes, 19 bytes each.
local p, router, position = KEYS[1], ARGV[1], ARGV[2]
local RECORDS, SECONDS = 1024, 60  -- limits of `r:changes`: a router that missed records also reads `r:owed`
local changes, now = p .. 'r:changes', now_ms()

local reply = { position }
local records = position == '' and call('XREVRANGE', changes, '+', '-', 'COUNT', 1) or call('XRANGE', changes, '(' .. position, '+')
for _, record in ipairs(records) do
  reply[1] = record[1]
  if position ~= '' and record[2][2] ~= router then reply[#reply + 1] = record[2][4] end
end

-- Only effective changes are published: a call may be repeated, and the slot's incarnation may have ended.
local function change(text)
  local slot, reservation = sub(text, 2, 3), sub(text, 4)
  local cost = struct.unpack('<d', reservation, 9)
  if sub(text, 1, 1) == '+' then
    if call('HEXISTS', p .. 'live', slot) == 0 or call('ZADD', p .. 'r:' .. slot, now, reservation) == 0 then return false end
    call('EXPIRE', p .. 'r:' .. slot, KEPT)
    call('HINCRBYFLOAT', p .. 'r:owed', slot, cost)
    call('EXPIRE', p .. 'r:owed', KEPT)
  else
    if call('ZREM', p .. 'r:' .. slot, reservation) == 0 then return false end
    if tonumber(call('HINCRBYFLOAT', p .. 'r:owed', slot, -cost)) < 0.5 then call('HDEL', p .. 'r:owed', slot) end
  end
  return true
end
local accepted = {}
for i = 3, #ARGV do
  if change(ARGV[i]) then accepted[#accepted + 1] = ARGV[i] end
end
if #accepted > 0 then
  reply[1] = call('XADD', changes, 'MAXLEN', '~', RECORDS, '*', 'f', router, 'c', table.concat(accepted))
  call('EXPIRE', changes, SECONDS)
end
if reply[1] == '' then reply[1] = '0-0' end
return reply
