-- Shared by the scripts: redis/scripts.py prepends the parts that a script uses. p is the key prefix (KEYS[1], `fl5:{namespace}:`);
-- A slot is the numbered place of one incarnation (one run of a worker). Slots are 2-byte strings, hashes 8-byte strings. Routers write `r:` and `q:` keys only (access_rules.py). See docs/design/prefix-index/keys.md.

local LIVE = '<ddc8dHc0Hc0Hc0dddddddddd'  -- a record of `live`: lease end (ms), lease (ms), epoch, block tokens, address, pod, revision, load time (ms), load
local CARD = '<dc8dHc0'                 -- lease, epoch, block tokens and address, from its 9th byte
local LOAD = '<dddddddddd'              -- its last LOAD_BYTES: load time, load
local LOAD_BYTES = 80
local FENCE = '<c8d'                   -- in `meta`, field `f` and the slot: epoch, sequence
local WIDE = 128                       -- added to a record's first byte: its holders are in a string, one byte per slot
local RUN = 6                          -- blocks per run: RUN_BLOCKS in changes.py; another number needs another schema
local NARROW = 64                      -- bytes that a record may take within its bucket: hash-max-listpack-value
local FILL = 16                        -- average records per bucket, so that a read scans few
local SPLITS = 8                       -- buckets that one batch may split, more than its runs can fill

local LOGGED = 16384                   -- records kept for the mirrors: at most 1.7 KB each, 2.5 s and more of a fleet that changes 100,000 blocks a second
local KEPT = 86400                     -- seconds until a key expires unless a worker renews it: see renew.lua

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
-- same at ten thousand and at a hundred million blocks, and no single call pays for the growth.
local function grid_of(count)
  local half = 1
  while half * 2 <= count do half = half * 2 end
  return { count = count, half = half, whole = half * 2 }
end

local function buckets_of(p) return grid_of(tonumber(call('HGET', p .. 'meta', 'buckets') or 0)) end

local function bucket_named(p, n)
  local low, middle = n % 256, n % 65536  -- no `floor`: a Lua call costs more than the arithmetic
  return p .. 'b' .. char((n - middle) / 65536, (middle - low) / 256, low)
end

local function bucket_key(p, grid, hash, at)
  local a, b, c = byte(hash, at, at + 2)
  local n = (c * 65536 + b * 256 + a) % grid.whole
  if n >= grid.count then n = n % grid.half end
  local low, middle = n % 256, n % 65536
  return p .. 'b' .. char((n - middle) / 65536, (middle - low) / 256, low)  -- `bucket_named`, without the call
end

-- Blocks are stored in runs, like the edges of a radix tree. A run has up to RUN consecutive blocks (changes.py); the depth of its first is a
-- multiple of RUN. Its record is a field of a bucket, named by the first block's hash. The value holds the number of blocks after the first (plus
-- WIDE, see there), their hashes, and 3 bytes per holder: its slot, and how many of the record's blocks it holds from the first on. If another
-- prompt diverges within the run, another record continues there, named by its first own block. Blocks are only appended to a record, and stay
-- while the first has a holder: so a held block is in one place only.
-- Returns the number of blocks after the first, whether the holders are in a wide string, and the offset of holders within the record.
local function parts_of(record)
  local behind = byte(record, 1)
  if behind >= WIDE then return behind - WIDE, true, #record + 1 end
  return behind, false, 2 + 8 * behind
end

-- Returns how many blocks a record, with `behind` blocks after its first, shares with a path. `rest`: the path's hashes after its first.
local function common(record, behind, rest)
  local least = math.min(8 * behind, #rest)
  if sub(record, 2, 1 + least) == sub(rest, 1, least) then return 1 + least / 8 end
  for at = 1, least, 8 do
    if sub(record, 1 + at, 8 + at) ~= sub(rest, at, at + 7) then return 1 + (at - 1) / 8 end
  end
end

local function read_live(record)
  local lease, lease_ms, epoch, bt, address, pod, revision, at, running, waiting, backlog, rate, step, free, total, page, arrivals =
    struct.unpack(LIVE, record)
  return { lease = lease, epoch = epoch, at = at, running = running, waiting = waiting, backlog = backlog, rate = rate, step = step, free = free,
           total = total, page = page, arrivals = arrivals, bt = bt, lease_ms = lease_ms, address = address, pod = pod, revision = revision }
end

local function pack_live(w)
  return struct.pack(LIVE, w.lease, w.lease_ms, w.epoch, w.bt, #w.address, w.address, #w.pod, w.pod, #w.revision, w.revision, w.at, w.running, w.waiting,
                     w.backlog, w.rate, w.step, w.free, w.total, w.page, w.arrivals)
end

-- Numbers a change that mirrors must see, and logs it while a mirror follows. Mirrors set `r:mirrored`, which expires when they stop.
-- A record's id is its number and the time in microseconds. The number shows a mirror that it missed a record. The time distinguishes a record after
-- a failover from the lost one with the same number: the later id is larger, so it is read. `told` in `meta` is the newest id, logged or not.
-- A later log starts with an empty record under that id, so that a mirror finds the record that its snapshot ended with.
-- Arguments after `record` are set in `meta`. `state`: `logged`, `told`, `logging` of `meta`.
local function log_change(p, state, mirrored, record, ...)
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

local function announce(p, record) log_change(p, call('HMGET', p .. 'meta', 'logged', 'told', 'logging'), is_mirrored(p), record) end

-- `leases` holds each slot's lease end (ms) at 8 bytes times its number; 0 for an ended incarnation.
local function set_lease(p, slot, ends) call('SETRANGE', p .. 'leases', slot_number(slot) * 8, struct.pack('<d', ends)) end

-- Returns {slot number -> whether its lease runs}. For a large fleet each entry is read on first access, as a request needs few. A worker's set is
-- prefix-closed until `kill`, so a search needs no more; `in_force` decides which workers are returned.
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

-- Whether a lease in a record of `live` runs. One that ends later than any lease can comes from another clock (a failover to a server that is
-- behind): its worker renews it within a fifth of its length, or is dead.
local function in_force(lease, lease_ms, now) return lease > now and lease <= now + lease_ms end

-- Returns the sequence in a slot's fence record if `epoch` is its live incarnation, otherwise nil.
local function sequence_in(record, epoch)
  if not record then return nil end
  local e, s = struct.unpack(FENCE, record)
  if e ~= epoch then return nil end
  return s
end

local function sequence(p, slot, epoch) return sequence_in(call('HGET', p .. 'meta', 'f' .. slot), epoch) end

-- Ends an incarnation: no reply lists it from now on. Its entries in the buckets are swept before the slot is reused.
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
  call('ZADD', p .. 'dead', slot_number(slot), slot)
  call('EXPIRE', p .. 'dead', KEPT)
end

-- Stored responses (fairlead_worker.api.response_store): `answers:r` and a name -> a response; `answers:all` and, for a tenant's tag, `answers:t` and it ->
-- members "tag name size" by their end (microseconds); `answers:bytes`: tag -> its bytes, '' -> those of all. Names and tags are MACs: no id or tenant is in Redis.
local function drop_response(p, member)
  local tag, name, size = string.match(member, '^(%x+) (%x+) (%d+)$')
  if not tag then call('ZREM', p .. 'answers:all', member) return end  -- forged
  call('ZREM', p .. 'answers:t' .. tag, member)
  call('DEL', p .. 'answers:r' .. name)
  if call('ZREM', p .. 'answers:all', member) == 1 then
    call('HINCRBY', p .. 'answers:bytes', '', -size)
    if call('HINCRBY', p .. 'answers:bytes', tag, -size) <= 0 then call('HDEL', p .. 'answers:bytes', tag) end
  end
end
