-- The end of an incarnation, by its own word: gone from every later answer. ARGV: pod, epoch. Does nothing to a later incarnation.
local p = KEYS[1]
local slot = call('HGET', p .. 'names', 'p' .. ARGV[1])
if slot and (sequence(p, slot, ARGV[2]) or call('HEXISTS', p .. 'meta', 'f' .. slot) == 0) then kill(p, slot) end  -- one in doubt has no fence
return { 'OK' }
