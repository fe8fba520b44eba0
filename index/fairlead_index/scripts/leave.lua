-- Ends an incarnation at its own request: no later reply lists it. ARGV: pod, epoch. Does nothing to a later incarnation.
local p = KEYS[1]
local slot = call('HGET', p .. 'names', 'p' .. ARGV[1])
if slot and sequence(p, slot, ARGV[2]) then kill(p, slot) end
return { 'OK' }
