-- Match, score and reserve, at once. ARGV: packed hashes, prompt tokens, id of the reservation (8 random bytes), candidates wanted, excluded addresses...
-- Returns {reservation, address, pod, cached tokens, expected microseconds, ...}, best first; {''} when no worker may be used.
local PRIOR_RATE = 4000  -- tokens a second, of a worker that has not measured its own yet
local SLACK = 1.25       -- a cold prefix goes to one of its two homes while they start it at most this much later than the best
local LEVELS = 8         -- depths told apart; holders of less count as holders of the first block

local p, hashes, prompt, id, wanted = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local excluded = {}
for i = 5, #ARGV do excluded[ARGV[i]] = true end

local now = now_ms()
local live = live_slots(p, now)
local depth, deepest = match(p, hashes, live, LEVELS)

-- Rendezvous: every pair of (block, address) has its own fixed rank. The block is the first that nobody holds: the first of all when cold.
local key = id
if #hashes >= 8 then
  local block = deepest < #hashes / 8 and deepest or deepest - 1
  key = sub(hashes, block * 8 + 1, block * 8 + 8)
end
local function rank(address) return redis.sha1hex(key .. address) end

local owed = {}
local flat = call('HGETALL', p .. 'owed')
for i = 1, #flat, 2 do owed[flat[i]] = tonumber(flat[i + 1]) end

local all, room = {}, false
for slot, record in pairs(live) do
  local w = read_live(record)
  if not excluded[w.address] then
    local cached = math.max(0, math.min((depth[slot] or 0) * w.bt, prompt - 1))  -- the last token is always computed: it gives the logits
    w.slot, w.cached = slot, cached
    w.cost = math.max(prompt - cached, w.bt)  -- even a prompt that is all cached takes its turn in a batch
    local rate = w.rate > 0 and w.rate or PRIOR_RATE
    local backlog = math.max(0, w.backlog - w.rate * (now - w.at) / 1000)  -- worked off since it was reported; what came since is owed
    w.seconds = (backlog + (owed[slot] or 0) + w.cost) / rate + w.step
    w.fits = w.total == 0 or w.page == 0 or w.free * w.page >= prompt - cached
    w.rank = rank(w.address)
    room = room or w.fits
    all[#all + 1] = w
  end
end
if #all == 0 then return { '' } end

local function sooner(a, b)
  if room and a.fits ~= b.fits then return a.fits end
  if a.seconds ~= b.seconds then return a.seconds < b.seconds end
  return a.rank < b.rank
end
table.sort(all, sooner)

-- A cold prefix has two homes, so that its next prompts find it; a burst overflows to the others before it queues there.
if deepest == 0 and #hashes >= 8 and #all > 2 then
  local first, second
  for i = 1, #all do
    local w = all[i]
    if not first or w.rank < all[first].rank then first, second = i, first
    elseif not second or w.rank < all[second].rank then second = i end
  end
  local home = math.min(first, second)  -- the sooner of the two
  if all[home].seconds <= SLACK * all[1].seconds and (all[home].fits or not room) then
    table.insert(all, 1, table.remove(all, home))
  end
end

local best = all[1]
local promise = id .. struct.pack('<d', best.cost)
call('ZADD', p .. 'r' .. best.slot, now, promise)
call('HINCRBYFLOAT', p .. 'owed', best.slot, best.cost)
local reply = { best.slot .. promise }
for i = 1, math.min(#all, wanted) do
  local w = all[i]
  reply[#reply + 1] = w.address
  reply[#reply + 1] = w.pod
  reply[#reply + 1] = w.cached
  reply[#reply + 1] = floor(w.seconds * 1e6)
end
return reply
