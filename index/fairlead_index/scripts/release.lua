-- Takes a reservation back: at the first token, or when the request failed before it. Once is enough, twice does no harm. ARGV: reservation.
local p, slot, promise = KEYS[1], sub(ARGV[1], 1, 2), sub(ARGV[1], 3)
if call('ZREM', p .. 'r:' .. slot, promise) == 1 then
  local owed = tonumber(call('HINCRBYFLOAT', p .. 'r:owed', slot, -struct.unpack('<d', promise, 9)))
  if owed < 0.5 then call('HDEL', p .. 'r:owed', slot) end
end
return { 'OK' }
