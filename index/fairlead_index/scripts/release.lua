-- Releases a reservation, at the first token or when the request failed before it. Idempotent. ARGV: reservation.
local p, slot, reservation = KEYS[1], sub(ARGV[1], 1, 2), sub(ARGV[1], 3)
if call('ZREM', p .. 'r:' .. slot, reservation) == 1 then
  local owed = tonumber(call('HINCRBYFLOAT', p .. 'r:owed', slot, -struct.unpack('<d', reservation, 9)))
  if owed < 0.5 then call('HDEL', p .. 'r:owed', slot) end
end
return { 'OK' }
