-- Shared by the scripts: connection.py puts those parts in front of a script that it uses. p is the key prefix (KEYS[1], `fl4:{namespace}:`);
-- slots are 2-byte strings, hashes 8-byte strings. Routers write `r:` and `q:` keys only (access_rules.py). See docs/index.md.

local LIVE = '<ddc8dHc0Hc0Hc0ddddddddd'  -- a record of `live`: lease end (ms), lease (ms), epoch, block tokens, address, pod, revision, load time (ms), load
local HEAD = '<ddc8dHc0Hc0'            -- its beginning: up to the pod
local CARD = '<dc8dHc0'                 -- lease, epoch, block tokens and address, from its 9th byte
local LOAD = '<ddddddddd'               -- its last 72 bytes: load time, load
local FENCE = '<c8d'                   -- in `meta`, under `f` and the slot: epoch, sequence
local WIDE = 128                       -- added to a record's first byte: its holders are in a string, a byte for each slot
local RUN = 6                          -- blocks of a run: RUN_BLOCKS in changes.py; another number is another schema
local NARROW = 64                      -- bytes that a record may take within its bucket: hash-max-listpack-value
local CIRCLE = 67108859                -- a prime below 2^26, the range of ranks: the product of two numbers below it is exact in a double
local POINTS = 10                      -- places of a worker on the ring, where a cold prompt finds its two homes: POINTS in ring.py
local FILL = 16                        -- records a bucket holds on average: a read looks at few
local SPLITS = 8                       -- buckets that one batch may split: more than its runs can fill

local LOGGED = 16384                   -- records kept for the mirrors: at most 1.7 KB each, 2.5 s and more of a fleet that changes 100,000 blocks a second
local KEPT = 86400                     -- s after which a key is gone unless a worker renews it: see renew.lua

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + floor(t[2] / 1000)
end

local function pack_slot(n)
  local low = n % 256
  return char((n - low) / 256, low)
end

local function slot_number(slot) local a, b = byte(slot, 1, 2) return a * 256 + b end

-- Buckets grow by linear hashing (Litwin, VLDB 1980): bucket n of 2^k <= count < 2^(k+1) has been split when n + 2^k exists. So an entry costs the
-- same at ten thousand blocks and at a hundred million, and no moment pays for growing.
local function grid_of(count)
  local half = 1
  while half * 2 <= count do half = half * 2 end
  return { count = count, half = half, whole = half * 2 }
end

local function buckets_of(p) return grid_of(tonumber(call('HGET', p .. 'meta', 'buckets') or 0)) end

local function bucket_named(p, n)
  local low, middle = n % 256, n % 65536  -- no `floor`: in Lua a call costs more than the arithmetic
  return p .. 'b' .. char((n - middle) / 65536, (middle - low) / 256, low)
end

local function bucket_key(p, grid, hash, at)
  local a, b, c = byte(hash, at, at + 2)
  local n = (c * 65536 + b * 256 + a) % grid.whole
  if n >= grid.count then n = n % grid.half end
  local low, middle = n % 256, n % 65536
  return p .. 'b' .. char((n - middle) / 65536, (middle - low) / 256, low)  -- `bucket_named`, without the call
end

-- Blocks are kept by runs, as the edges of a radix tree: a run is up to RUN blocks (changes.py) that follow each other, the first at a depth that
-- RUN divides. Its record is a field of a bucket, named by the first block's hash; the value is the number of blocks behind that (more WIDE: see
-- there), their hashes, and for each holder 3 bytes: its slot, and how many of the record's blocks it holds, from the first on. Where another
-- prompt parts from them within the run, another record goes on, named by the first block of its own. A record's blocks are added to at their end
-- and never taken away while anybody holds the first: so a block that somebody holds is in one place only.
-- Returns how many blocks are behind the first, whether the holders are elsewhere, and where those that are not begin.
local function parts_of(record)
  local behind = byte(record, 1)
  if behind >= WIDE then return behind - WIDE, true, #record + 1 end
  return behind, false, 2 + 8 * behind
end

-- How many blocks a record, of `behind` after its first, has in common with those that follow the first of a path.
local function common(record, behind, rest)
  local least = math.min(8 * behind, #rest)
  if sub(record, 2, 1 + least) == sub(rest, 1, least) then return 1 + least / 8 end
  for at = 1, least, 8 do
    if sub(record, 1 + at, 8 + at) ~= sub(rest, at, at + 7) then return 1 + (at - 1) / 8 end
  end
end

local function read_live(record)
  local lease, lease_ms, epoch, bt, address, pod, revision, at, running, waiting, backlog, rate, step, free, total, page = struct.unpack(LIVE, record)
  return { lease = lease, epoch = epoch, at = at, running = running, waiting = waiting, backlog = backlog, rate = rate, step = step, free = free,
           total = total, page = page, bt = bt, lease_ms = lease_ms, address = address, pod = pod, revision = revision }
end

local function pack_live(w)
  return struct.pack(LIVE, w.lease, w.lease_ms, w.epoch, w.bt, #w.address, w.address, #w.pod, w.pod, #w.revision, w.revision, w.at, w.running, w.waiting,
                     w.backlog, w.rate, w.step, w.free, w.total, w.page)
end

-- Numbers a change of what mirrors show, and logs it while a mirror follows. `r:mirrored` is set by mirrors and expires when they stop.
-- A record's id is its number, so that a mirror sees that it missed one, and the time in microseconds, so that a mirror does not take a record that was
-- told after a failover for the lost one with the same number: the later is the larger, and so it is read. `told` in `meta` is the newest id, logged or not. A log that begins later
-- starts with an empty record under that id: so a mirror finds the record that its snapshot ended with. What follows `record` is set in `meta`.
-- `state`: `logged`, `told`, `logging` of `meta`.
local function tell(p, state, mirrored, record, ...)
  local logged, told, logging = unpack(state)
  local t = call('TIME')
  local number = tonumber(logged or 0) + 1
  local id = number .. '-' .. t[1] .. sub('00000' .. t[2], -6)
  if mirrored then
    if logging ~= '1' then
      call('HSET', p .. 'meta', 'logging', 1)
      call('DEL', p .. 'log')
      if told then call('XADD', p .. 'log', told, 'r', 'A\0\0') end
    end
    call('XADD', p .. 'log', 'MAXLEN', '~', LOGGED, id, 'r', record)
  elseif logging == '1' then
    call('HSET', p .. 'meta', 'logging', 0)
    call('DEL', p .. 'log')
  end
  call('HSET', p .. 'meta', 'logged', number, 'told', id, ...)
end

local function is_mirrored(p) return call('EXISTS', p .. 'r:mirrored') == 1 end

local function announce(p, record) tell(p, call('HMGET', p .. 'meta', 'logged', 'told', 'logging'), is_mirrored(p), record) end

-- `leases` holds each slot's lease end (ms) at 8 bytes times its number; 0 for a slot that was killed.
local function set_lease(p, slot, ends) call('SETRANGE', p .. 'leases', slot_number(slot) * 8, struct.pack('<d', ends)) end

-- {slot number -> whether its lease has not run out}; of a large fleet each is read when it is first asked for: a request looks at few. What a
-- worker holds is prefix-closed until it is killed, so this is all that a search needs; `in_force` decides which workers are named.
local function living(p, now)
  local leases = call('GET', p .. 'leases') or ''
  local count = #leases / 8
  if count <= 64 then
    local ends, lives = { struct.unpack('<' .. string.rep('d', count), leases) }, {}
    for i = 1, count do lives[i - 1] = ends[i] > now end
    return lives
  end
  return setmetatable({}, { __index = function(lives, n)
    local alive = n * 8 + 8 <= #leases and (struct.unpack('<d', leases, n * 8 + 1)) > now
    lives[n] = alive
    return alive
  end })
end

-- Whether a lease of a record of `live` has not run out. One that ends later than any lease can was written by another clock (a failover to a
-- server that is behind): its worker renews it within a fifth of it, or is dead.
local function in_force(lease, lease_ms, now) return lease > now and lease <= now + lease_ms end

-- A worker that has not measured its own yet is taken to prefill 4,000 tokens a second.
local function rate_of(measured) return measured > 0 and measured or 4000 end

local FLEET = 1                        -- seconds of our work that count twice: those who come after wait for it too
local ITL_STEPS = 4                    -- steps of the decodes beside us that count, so that a pod whose streams are slow already gets less
local NO_ROOM = 1e9                    -- seconds

-- What a choice costs beyond its own time to the first token, in seconds.
local function surcharge(work, step) return math.min(FLEET, work) + ITL_STEPS * step end

local function room_of(free, total, page) return (total == 0 or page == 0) and math.huge or free * page end

-- `r:ready` orders the workers as the score does for a prompt of usual length that none holds, in ms. `free_at`: when it could begin.
local USUAL = 2048
local function set_ready(p, slot, free_at, rate, step, room)
  local work = USUAL / rate
  call('ZADD', p .. 'r:ready', free_at + 1000 * (work + surcharge(work, step) + (room < USUAL and NO_ROOM or 0)), slot)
end

-- The sequence of a record of a slot's fence when `epoch` is its living incarnation, else nil.
local function sequence_in(record, epoch)
  if not record then return nil end
  local e, s = struct.unpack(FENCE, record)
  if e ~= epoch then return nil end
  return s
end

local function sequence(p, slot, epoch) return sequence_in(call('HGET', p .. 'meta', 'f' .. slot), epoch) end

-- One incarnation is over: nothing names it from here on. Its entries in the buckets are swept before the slot is used again.
local function kill(p, slot)
  local record = call('HGET', p .. 'live', slot)
  if record then
    local w = read_live(record)
    for _, name in ipairs({ 'p' .. w.pod, 'a' .. w.address }) do
      if call('HGET', p .. 'names', name) == slot then call('HDEL', p .. 'names', name) end
    end
  end
  call('HDEL', p .. 'live', slot)
  set_lease(p, slot, 0)
  call('HDEL', p .. 'meta', 'f' .. slot)
  announce(p, 'K' .. slot)
  call('HDEL', p .. 'r:owed', slot)
  call('HDEL', p .. 'r:recall', slot)
  call('DEL', p .. 'r:' .. slot)
  call('ZREM', p .. 'r:ready', slot)
  for point = 0, POINTS - 1 do call('ZREM', p .. 'ring', slot .. char(point)) end
  call('ZADD', p .. 'dead', slot_number(slot), slot)
  call('EXPIRE', p .. 'dead', KEPT)
end
