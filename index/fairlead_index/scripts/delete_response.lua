-- Deletes a stored response. ARGV: its name. Returns {'OK'}.
local p = KEYS[1]
local member = call('HGET', p .. 'answers:r' .. ARGV[1], 'member')
if member then drop_response(p, member) end
return { 'OK' }
