-- Shared by every script. p is the key prefix (KEYS[1], `fl1:{namespace}:`); slots are 2-byte strings, hashes 8-byte strings. See docs/index.md.
local call = redis.call
local byte, sub, char, floor = string.byte, string.sub, string.char, math.floor

local LIVE = '<ddHc0Hc0Hc0dddddddddd'  -- a record of `live`: lease end (ms), block tokens, address, pod, revision, lease, load time (ms), load
local CARD = '<dHc0'                    -- as much of it as a match needs, from its 9th byte
local FENCE = '<c8d'                   -- a record of `fence`: epoch, sequence
local WIDE = 'W'                       -- in a bucket: the holders are in a bitmap
local NARROW = 31                      -- slots a bucket entry may list: 62 bytes, within hash-max-listpack-value

local LOGGED = 4096                    -- records kept for the mirrors: at most 2 KB each; 10 s at 100,000 changes a second

local KEPT = 86400                     -- s after which a key is gone unless a worker renews it: see renew.lua

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + floor(t[2] / 1000)
end

local function pack_slot(n) return char(floor(n / 256), n % 256) end
local function slot_number(slot) local a, b = byte(slot, 1, 2) return a * 256 + b end

local function bucket_key(p, buckets, hash, at)
  local a, b = byte(hash, at, at + 1)
  local n = (a * 256 + b) % buckets
  return p .. 'b' .. pack_slot(n)
end

local function buckets_of(p) return tonumber(call('HGET', p .. 'meta', 'buckets') or 0) end

local function read_live(record)
  local lease, bt, address, pod, revision, lease_ms, at, running, waiting, backlog, rate, step, free, total, page = struct.unpack(LIVE, record)
  return { lease = lease, at = at, running = running, waiting = waiting, backlog = backlog, rate = rate, step = step, free = free,
           total = total, page = page, bt = bt, lease_ms = lease_ms, address = address, pod = pod, revision = revision }
end

local function pack_live(w)
  return struct.pack(LIVE, w.lease, w.bt, #w.address, w.address, #w.pod, w.pod, #w.revision, w.revision, w.lease_ms, w.at, w.running, w.waiting,
                     w.backlog, w.rate, w.step, w.free, w.total, w.page)
end

-- Tells the mirrors. A record's id is its number, without gaps, so that a mirror sees that it missed something, and the time in microseconds,
-- so that after a failover which lost records a mirror does not take a new one for the one that it read under the same number.
local function tell(p, record)
  local number = call('HINCRBY', p .. 'meta', 'logged', 1)
  local t = call('TIME')
  call('XADD', p .. 'log', 'MAXLEN', '~', LOGGED, string.format('%.0f-%s%06d', number, t[1], t[2]), 'r', record)
end

-- `leases` holds each slot's lease end (ms) at 8 bytes times its number: one read tells a match who lives, however many workers there are.
local function set_lease(p, slot, ends) call('SETRANGE', p .. 'leases', slot_number(slot) * 8, struct.pack('<d', ends)) end

-- {slot -> whether it lives}, each looked up when it is first asked for.
local function living(p, now)
  local leases, unpack = call('GET', p .. 'leases') or '', struct.unpack
  local length = #leases
  return setmetatable({}, { __index = function(known, slot)
    local a, b = byte(slot, 1, 2)
    local at = (a * 256 + b) * 8 + 1
    local lives = at + 7 <= length and unpack('<d', leases, at) > now
    known[slot] = lives
    return lives
  end })
end

-- Slots whose lease has not run out, as {slot -> record}. Dead slots are not in `live` at all.
local function live_slots(p, now)
  local all, live, unpack = call('HGETALL', p .. 'live'), {}, struct.unpack
  for i = 1, #all, 2 do
    if unpack('<d', all[i + 1]) > now then live[all[i]] = all[i + 1] end
  end
  return live
end

-- The slot's sequence when (slot, epoch) is a living incarnation, else nil.
local function sequence(p, slot, epoch)
  local record = call('HGET', p .. 'fence', slot)
  if not record then return nil end
  local e, s = struct.unpack(FENCE, record)
  if e ~= epoch then return nil end
  return s
end

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
  call('HDEL', p .. 'fence', slot)
  tell(p, 'K' .. slot)
  call('HDEL', p .. 'owed', slot)
  call('DEL', p .. 'r' .. slot)
  call('ZADD', p .. 'dead', slot_number(slot), slot)
  call('EXPIRE', p .. 'dead', KEPT)
end
