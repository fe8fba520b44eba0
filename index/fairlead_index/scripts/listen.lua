-- A mirror reads along: changes are logged from now on, until LISTENED after the last of these calls. No ARGV. Returns {'OK'}.
local p = KEYS[1]
local LISTENED = 300  -- s
local state = call('HMGET', p .. 'meta', 'logged', 'mirrored', 'told', 'birth')
if not state[4] then return { 'OK' } end  -- nothing to read along: whoever joins begins another namespace
local now = tonumber(call('TIME')[1])
local before = tonumber(state[2] or 0)
state[2] = string.format('%d', now + LISTENED)
call('HSET', p .. 'meta', 'mirrored', state[2])
if now >= before then tell(p, state, 'A\0\0') end  -- no change, so that `told` is in the log
call('EXPIRE', p .. 'log', KEPT)
return { 'OK' }
