-- Match, score and reserve, at once. ARGV: packed hashes, prompt tokens, id of the reservation (8 random bytes), candidates wanted, excluded addresses...
-- Returns {reservation, address, pod, cached tokens, expected microseconds, ...}, best first; {''} when no worker may be used.
local PRIOR_RATE = 4000  -- tokens a second, of a worker that has not measured its own yet
local SLACK = 1.25       -- a cold prefix goes to one of its two homes while they start it at most this much later than the best, and by its own work
local FLEET = 1          -- seconds of our work that count twice: those who come after wait for it too
local ITL_STEPS = 4      -- steps of the decodes beside us that count, so that a pod whose streams are slow already gets less
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
local ranks = {}
local function rank(address)
  local known = ranks[address]
  if not known then
    known = redis.sha1hex(key .. address)
    ranks[address] = known
  end
  return known
end

local owed = {}
local flat = call('HGETALL', p .. 'owed')
for i = 1, #flat, 2 do owed[flat[i]] = tonumber(flat[i + 1]) end

local function sooner(a, b)
  if a.fits ~= b.fits then return a.fits end  -- one that has no room is the last resort
  if a.score ~= b.score then return a.score < b.score end
  return rank(a.address) < rank(b.address)
end

local max, min, unpack = math.max, math.min, struct.unpack
local all, first, second = {}, nil, nil  -- the `wanted` soonest, in order; the two homes
local cold = deepest == 0 and #hashes >= 8
for slot, record in pairs(live) do
  local _, bt, address, pod, _, _, at, _, _, backlog, rate, step, free, total, page = unpack(LIVE, record)
  if not excluded[address] then
    local cached = max(0, min((depth[slot] or 0) * bt, prompt - 1))  -- the last token is always computed: it gives the logits
    local cost = max(prompt - cached, bt)                                 -- even a prompt that is all cached takes its turn in a batch
    backlog = max(0, backlog - rate * (now - at) / 1000)                  -- worked off since the report; what came since is owed
    local speed = rate > 0 and rate or PRIOR_RATE
    local work = cost / speed
    local seconds = (backlog + (owed[slot] or 0)) / speed + work + step
    local w = { slot = slot, address = address, pod = pod, cached = cached, cost = cost, work = work, seconds = seconds,
                score = seconds + min(FLEET, work) + ITL_STEPS * step,
                fits = total == 0 or page == 0 or free * page >= prompt - cached }
    if cold then
      if not first or rank(address) < rank(first.address) then first, second = w, first
      elseif not second or rank(address) < rank(second.address) then second = w end
    end
    if #all < wanted or sooner(w, all[#all]) then
      local place = #all + 1
      while place > 1 and sooner(w, all[place - 1]) do place = place - 1 end
      table.insert(all, place, w)
      all[wanted + 1] = nil
    end
  end
end
if #all == 0 then return { '' } end

-- A cold prefix has two homes, so that its next prompts find it; a burst overflows to the others before it queues there.
if second then
  local home = sooner(first, second) and first or second
  if home ~= all[1] and home.seconds <= min(SLACK * all[1].seconds, all[1].seconds + home.work) and (home.fits or not all[1].fits) then
    for i = 2, #all do
      if all[i] == home then table.remove(all, i) break end
    end
    table.insert(all, 1, home)
    all[wanted + 1] = nil
  end
end

local best = all[1]
local promise = id .. struct.pack('<d', best.cost)
call('ZADD', p .. 'r' .. best.slot, now, promise)
call('HINCRBYFLOAT', p .. 'owed', best.slot, best.cost)
local reply = { best.slot .. promise }
for _, w in ipairs(all) do
  reply[#reply + 1] = w.address
  reply[#reply + 1] = w.pod
  reply[#reply + 1] = w.cached
  reply[#reply + 1] = floor(w.seconds * 1e6)
end
return reply
