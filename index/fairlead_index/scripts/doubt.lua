-- What the index says about a slot's blocks is in doubt (an audit found it wrong): from now on it holds nothing, and may still be chosen. Its
-- worker's next call finds its incarnation over, and it joins again with a snapshot. ARGV: slot (2 bytes). Returns {1}, or {0} when it is not live.
local p, slot = KEYS[1], ARGV[1]
local record = call('HGET', p .. 'live', slot)
if not record or call('HDEL', p .. 'fence', slot) == 0 then return { 0 } end
set_lease(p, slot, -read_live(record).lease)
tell(p, 'K' .. slot)
return { 1 }
