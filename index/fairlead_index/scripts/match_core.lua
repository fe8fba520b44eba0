-- How deep each living slot holds a chain of hashes.
--
-- A slot's set of blocks is prefix-closed (parents are stored first, children removed first, batches are atomic), so the sets of *living* holders only
-- shrink with depth: binary-search the deepest run whose first block anyone holds, then each run where that set grows; the records of a
-- holder's last run give its exact depth. Dead slots are filtered before every comparison: a half swept one is no longer prefix-closed and would
-- mislead the search. Slots are numbers here; `lives[slot]` is true for live ones.
-- With `soonest`, a list of slots, the search finds only those and about `limit` of the deepest holders, and reads no more holders of a record. So a
-- system prompt costs the same with twenty holders as with all of a large fleet.
-- Returns {slot -> depth}, the slots with the deepest first, and the deepest level.
local function match(p, hashes, lives, max_levels, limit, soonest)
  local count, grid = #hashes / 8, buckets_of(p)
  if count == 0 or grid.count == 0 then return {}, {}, 0 end
  local start = call('HGET', bucket_key(p, grid, hashes, 1), sub(hashes, 1, 8))
  if not start then return {}, {}, 0 end  -- a cold prompt needs none of what follows
  local sets, seen, empty_set = {}, {}, { holders = {}, held = {}, size = 0, soonest_count = 0 }
  local is_soonest = {}
  if soonest then
    for i = 1, #soonest do is_soonest[soonest[i]] = true end
  end
  local none = string.rep('\0', 64)  -- a piece of a wide string without holders

  -- Returns a record's live holders, how many of its blocks each holds, whether all hold equally many, and how many are in `soonest`.
  local function wide_holders(map)
    local holders, held, even, count, most, soonest_count = {}, {}, true, 0, nil, 0
    if soonest and #map > 64 then
      for i = 1, #soonest do
        local n = soonest[i]
        local blocks = byte(map, n + 1) or 0
        if blocks > 0 then
          count = count + 1
          holders[count], held[n] = n, blocks
          most = most or blocks
          if blocks ~= most then even = false end
        end
      end
      soonest_count = count
    end
    local most_holders = #map > 64 and limit or math.huge
    for from = 1, #map, 64 do
      if count >= most_holders then break end
      if sub(map, from, from + 63) ~= none then
        local piece = { byte(map, from, from + 63) }
        for i = 1, #piece do
          local blocks = piece[i]
          local n = from + i - 2
          if blocks > 0 and lives[n] and not held[n] then
            if count >= most_holders then break end
            count = count + 1
            holders[count], held[n] = n, blocks
            if is_soonest[n] then soonest_count = soonest_count + 1 end
            most = most or blocks
            if blocks ~= most then even = false end
          end
        end
      end
    end
    return { holders = holders, held = held, even = even, size = count, soonest_count = soonest_count }
  end

  local function narrow_holders(packed)
    local holders, held, even, count, soonest_count = {}, {}, true, 0, 0
    for i = 1, #packed, 3 do
      local a, b, blocks = byte(packed, i, i + 2)
      local n = a * 256 + b
      if lives[n] then
        count = count + 1
        holders[count], held[n] = n, blocks
        if is_soonest[n] then soonest_count = soonest_count + 1 end
        if blocks ~= held[holders[1]] then even = false end
      end
    end
    return { holders = holders, held = held, even = even, size = count, soonest_count = soonest_count }
  end

  -- The holders of the record that the block `at` (counted from 0) names, and the record.
  local function record_at(at)
    local name = sub(hashes, at * 8 + 1, at * 8 + 8)
    local record = at == 0 and start or call('HGET', bucket_key(p, grid, name, 1), name)
    if not record then return empty_set, '' end
    local _, wide, first = parts_of(record)
    local packed = wide and WIDE .. (call('GET', p .. 'w' .. name) or '') or sub(record, first)
    local set = sets[packed]  -- neighbours mostly have equal sets: read each once
    if not set then
      set = wide and wide_holders(sub(packed, 4)) or narrow_holders(packed)
      sets[packed] = set
    end
    return set, record
  end

  -- Returns the holders of the first block of a run. Levels count runs from 1.
  local records = {}
  local function set_at(level)
    local set, record = record_at((level - 1) * RUN)
    seen[level], records[level] = set, record
    return set
  end

  -- Returns the counted holders of a level: all, or once enough were found, those in `soonest`.
  local by_soonest = false
  local function size_of(level)
    local set = seen[level] or set_at(level)
    return by_soonest and set.soonest_count or set.size
  end

  -- Returns the deepest level in [low, high) with more counted holders than `size`, given that `low` is one.
  local function deepest(low, high, size)
    for level, set in pairs(seen) do  -- reuses levels that earlier searches read
      if level > low and level < high and (by_soonest and set.soonest_count or set.size) > size then low = level end
    end
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      if size_of(middle) > size then low = middle else high = middle end
    end
    return low
  end

  local depth, slots = {}, {}

  -- Sets the depths of those `pending` slots that hold blocks of the record named by block `first`, or of a record that diverges from it.
  -- Returns whether all depths are surely equal.
  local function reach(pending, set, record, first, last)
    local behind = parts_of(record)
    local shared = common(record, behind, sub(hashes, first * 8 + 9, last * 8))
    local parted = shared <= behind and first + shared < last
    local held, further = set.held, {}
    for i = 1, #pending do
      local slot = pending[i]
      local blocks = held[slot]
      if blocks then
        if blocks >= shared then
          blocks = shared
          if parted then further[#further + 1] = slot end
        end
        depth[slot] = first + blocks
      end
    end
    if #further == 0 then return set.even end
    local branch, its = record_at(first + shared)
    if its ~= '' then reach(further, branch, its, first + shared, last) end
    return false
  end

  -- Sets the depths of the slots whose last run is `level`.
  local function settle(level)
    local here, pending, before = seen[level].holders, {}, #slots
    for i = 1, #here do
      local slot = here[i]
      if not depth[slot] then
        pending[#pending + 1] = slot
        slots[before + #pending] = slot
      end
    end
    local first = (level - 1) * RUN
    if reach(pending, seen[level], records[level], first, math.min(first + RUN, count)) then return end
    table.sort(pending, function(a, b)
      if depth[a] ~= depth[b] then return depth[a] > depth[b] end
      return a < b
    end)
    for i = 1, #pending do slots[before + i] = pending[i] end
  end

  if size_of(1) == 0 then return depth, slots, 0 end
  local level, levels = deepest(1, math.ceil(count / RUN) + 1, 0), 1
  while true do
    settle(level)
    by_soonest = by_soonest or soonest and #slots >= limit
    if size_of(level) == size_of(1) then return depth, slots, depth[slots[1]] end
    levels = levels + 1
    level = levels < max_levels and deepest(1, level, size_of(level)) or 1  -- past the limit the rest hold at least the first run's beginning
  end
end
