-- Matches, scores and reserves atomically. ARGV: packed hashes, prompt tokens, id of the reservation (8 random bytes), candidates wanted, packed slots to leave
-- out, addresses to leave out... Returns {reservation, CANDIDATE, ...}, best first, each packed as in reader.py (`_CANDIDATE`);
-- {''} if no worker may be used.
local SLACK = 1.25       -- a cold prefix goes to one of its two homes if that starts it at most this factor later than the best, and at most its own work later
local SMALL = 16         -- workers up to which all are scored: SMALL_FLEET in score.py
local CONSIDERED = 12    -- of a larger fleet: the homes of a cold prompt or its deepest holders, then the soonest
local HOLDERS = 6
local MAX_WAITING = 10000 -- waiting requests of one worker that count, and requests a second: a forged report cannot make the price infinite or NaN
local FORESIGHT = 1      -- seconds of its work in which arriving requests count
local PAGE, SEEN = 4, 64 -- points of the ring read at once, and at most, each way
local LEVELS = 8         -- distinct depths; shallower holders count as holders of the first run, as far as they hold it

local p, hashes, prompt, id, wanted = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local now = now_ms()
local lives = living(p, now)
for i = 1, #ARGV[5], 2 do lives[slot_number(sub(ARGV[5], i, i + 1))] = false end
if #ARGV > 5 then
  local names = {}
  for i = 6, #ARGV do names[i - 5] = 'a' .. ARGV[i] end
  for _, slot in ipairs(call('HMGET', p .. 'names', unpack(names))) do
    if slot then lives[slot_number(slot)] = false end
  end
end
-- The workers that come first by the score for a usual prompt. Dead and excluded workers may come first: read on past them.
local soonest, slot_of, from = {}, {}, 0
repeat
  local page = call('ZRANGE', p .. 'r:ready', from, from + SMALL)
  for i = 1, #page do
    local a, b = byte(page[i], 1, 2)
    local n = a * 256 + b
    if lives[n] then soonest[#soonest + 1], slot_of[n] = n, page[i] end
  end
  from = from + SMALL + 1
until #page <= SMALL or #soonest > SMALL
local most, holding = SMALL, SMALL
if #soonest > SMALL then
  most, holding = CONSIDERED, HOLDERS
  for i = #soonest, CONSIDERED + 1, -1 do soonest[i] = nil end
end
local depth, holders, deepest = match(p, hashes, lives, LEVELS, most, most < SMALL and soonest)
local cold = deepest == 0 and #hashes >= 8

-- Of equals the lower rank wins: every pair of (block, address) has a fixed one, for all routers alike. The block is the first without a holder; for a
-- cold prompt the first of all. A block scales and shifts an address' seed on a circle, and the lowest wins (multiply-add hashing).
local key = id
if #hashes >= 8 then
  local block = deepest < #hashes / 8 and deepest or deepest - 1
  key = sub(hashes, block * 8 + 1, block * 8 + 8)
end
local stretch, turn = struct.unpack('<I4I4', key)
stretch, turn = stretch % (CIRCLE - 1) + 1, turn % CIRCLE
local seeds
local ranks = setmetatable({}, { __index = function(known, n)
  seeds = seeds or call('GET', p .. 'seeds')
  local at = (struct.unpack('<I4', seeds, n * 4 + 1) * stretch + turn) % CIRCLE
  known[n] = at
  return at
end })

local slots, numbers, count, known = {}, {}, 0, {}
local function consider(n)
  if known[n] or not lives[n] then return end
  known[n] = true
  count = count + 1
  slots[count], numbers[count] = slot_of[n] or pack_slot(n), n
end

local first, second
if cold then
  -- The first two workers on the ring from the block's place on (consistent hashing, Karger et al. 1997).
  local place = (struct.unpack('<I4', hashes))
  local function scan(low, high)
    local seen = 0
    repeat
      local points = call('ZRANGEBYSCORE', p .. 'ring', low, high, 'LIMIT', seen, PAGE)
      for i = 1, #points do
        local a, b = byte(points[i], 1, 2)
        local n = a * 256 + b
        if not second and n ~= first and lives[n] then
          if first then second = n else first = n end
          consider(n)
        end
      end
      seen = seen + PAGE
    until second or #points < PAGE or seen >= SEEN
  end
  scan(place, '+inf')
  if not second then scan('-inf', '(' .. place) end
end
for i = 1, math.min(#holders, holding) do consider(holders[i]) end
for i = 1, #soonest do
  if count < most then consider(soonest[i]) end
end
if count == 0 then return { '' } end

local function sooner(a, b)  -- `late` is the score, in seconds; a worker without room is the last resort
  if a.late ~= b.late then return a.late < b.late end
  return ranks[a.number] < ranks[b.number]
end

local max, min, fields = math.max, math.min, struct.unpack
local records, reserved = call('HMGET', p .. 'live', unpack(slots)), call('HMGET', p .. 'r:owed', unpack(slots))
-- A second of prefill delays the requests that wait for a first token: half of it those of the worker, half of it those of the fleet (score.md).
local loads, usable, pending = {}, 0, 0
for i = 1, count do
  local record, lease, lease_ms, bt = records[i], 0, 0, 0
  if record then lease, lease_ms, bt = fields('<ddxxxxxxxxd', record) end  -- the epoch is between them
  if lease > now and lease <= now + lease_ms then  -- `in_force`
    local load = { fields(LOAD, record, #record - LOAD_BYTES + 1) }
    load.bt, load.pending = bt, max(0, min(MAX_WAITING, load[3])) + (load[4] > 0 and 1 or 0)
    loads[i], usable, pending = load, usable + 1, pending + load.pending
  end
end
local congestion = pending / max(1, usable)
local all, homes = {}, {}  -- the `wanted` soonest, in order; the two homes
for i = 1, count do
  local load = loads[i]
  if load then
    local slot, number, record, bt = slots[i], numbers[i], records[i], load.bt
    local at, backlog, rate, step, free, total, page = load[1], load[4], load[5], load[6], load[7], load[8], load[9]
    local reusable = prompt - 1                                      -- the last token is always computed: it gives the logits
    if page > 0 then reusable = reusable - reusable % page end       -- and only whole pages are reused
    local cached = max(0, min((depth[number] or 0) * bt, reusable))
    local cost = max(prompt - cached, bt)                            -- even a fully cached prompt takes part in a batch
    backlog = max(0, backlog - rate * max(0, now - at) / 1000)       -- less the work since the report; later requests are in the reservations
    local speed = rate_of(rate)
    local work = cost / speed
    local seconds = (backlog + (reserved[i] or 0)) / speed + work + step
    local arrivals = max(0, min(MAX_WAITING, load[10]))
    local delayed = (load.pending + congestion) / 2 + arrivals * min(work, FORESIGHT) / 2
    local price = delayed > 0 and work * delayed or 0                -- a forged rate can make the work infinite, and infinity times 0 is NaN
    local score = seconds + (price + ITL_STEPS * step)
    local room = room_of(free, total, page)
    local fits = room >= prompt - cached
    local late, place = fits and score or score + NO_ROOM, #all
    local home = number == first or number == second
    local last = all[place]
    if home or place < wanted or late < last.late or late == last.late and ranks[number] < ranks[last.number] then
      local w = { record = record, slot = slot, number = number, cached = cached, cost = cost, work = work, seconds = seconds,
                  late = late, rate = speed, step = step, room = room }
      if home then homes[#homes + 1] = w end
      while place > 0 and sooner(w, all[place]) do
        all[place + 1] = all[place]
        place = place - 1
      end
      all[place + 1] = w
      all[wanted + 1] = nil
    end
  end
end
if #all == 0 then return { '' } end

-- A cold prefix has two homes, so that its next prompts find it; a burst overflows to the others before it queues there.
local home = homes[1]
if home then
  if homes[2] and sooner(homes[2], home) then home = homes[2] end
  local latest = min(SLACK * all[1].seconds, all[1].seconds + home.work)
  if home ~= all[1] and home.seconds <= latest and (home.late < NO_ROOM or all[1].late >= NO_ROOM) then
    for i = 2, #all do
      if all[i] == home then table.remove(all, i) break end
    end
    table.insert(all, 1, home)
    all[wanted + 1] = nil
  end
end

local best = all[1]
local reservation = id .. struct.pack('<d', best.cost)
call('ZADD', p .. 'r:' .. best.slot, now, reservation)
if tonumber(call('HINCRBYFLOAT', p .. 'r:owed', best.slot, best.cost)) <= best.cost then  -- the first one: the keys may be new
  call('EXPIRE', p .. 'r:' .. best.slot, KEPT)
  call('EXPIRE', p .. 'r:owed', KEPT)
end
set_ready(p, best.slot, now + 1000 * best.seconds, best.rate, best.step, best.room - best.cost)
local reply, pack = { best.slot .. reservation }, struct.pack
for i = 1, #all do
  local w = all[i]
  local _, _, epoch, _, address = fields(HEAD, w.record)
  reply[i + 1] = pack('<i8i8Bc8c2c0', w.cached, floor(w.seconds * 1e6), w.late < NO_ROOM and 1 or 0, epoch, w.slot, address)
end
return reply
