-- How deep each living slot holds a chain of hashes. Shared by `match` and `route`.
--
-- A slot's set of blocks is prefix-closed (parents are stored first, children removed first, batches are atomic), so the sets of *living* holders only
-- shrink with depth: binary-search the deepest block that anyone holds, then each depth where the set grows. Dead slots are filtered before every
-- comparison: one that is half swept is not closed any more and would mislead the search. Slots are numbers here; `lives[slot]` is true of the living.
-- Returns {slot -> depth}, the slots with the deepest first, and the deepest level.
local function match(p, hashes, lives, max_levels)
  local count, grid = #hashes / 8, buckets_of(p)
  if count == 0 or grid.count == 0 then return {}, {}, 0 end
  local sets, seen = { [''] = {} }, {}

  local function wide_holders(map)
    local found, count = {}, 0
    for at = 1, #map do
      local bits, n = byte(map, at), at * 8 - 1
      while bits > 0 do
        if bits % 2 == 1 then
          if lives[n] then
            count = count + 1
            found[count] = n
          end
          bits = bits - 1
        end
        bits, n = bits / 2, n - 1
      end
    end
    return found
  end

  local function narrow_holders(packed)
    local found, count = {}, 0
    for i = 1, #packed, 2 do
      local a, b = byte(packed, i, i + 1)
      local n = a * 256 + b
      if lives[n] then
        count = count + 1
        found[count] = n
      end
    end
    return found
  end

  local function holders(level)
    local found = seen[level]
    if found then return found end
    local hash = sub(hashes, level * 8 - 7, level * 8)
    local packed = call('HGET', bucket_key(p, grid, hash, 1), hash) or ''
    local wide = packed == WIDE
    if wide then packed = WIDE .. (call('GET', p .. 'w' .. hash) or '') end
    found = sets[packed]  -- neighbours mostly have equal sets: read each once
    if not found then
      found = wide and wide_holders(sub(packed, 2)) or narrow_holders(packed)
      sets[packed] = found
    end
    seen[level] = found
    return found
  end

  -- The deepest level in [low, high) whose holders outnumber `size`, given that `low` does.
  local function deepest(low, high, size)
    for level, found in pairs(seen) do  -- from what the searches before have seen
      if level > low and level < high and #found > size then low = level end
    end
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      if #holders(middle) > size then low = middle else high = middle end
    end
    return low
  end

  local depth, slots, first = {}, {}, #holders(1)
  if first == 0 then return depth, slots, 0 end
  local level = deepest(1, count + 1, 0)
  local deepest_level, levels = level, 1
  while true do
    for _, slot in ipairs(holders(level)) do
      if not depth[slot] then
        depth[slot] = level
        slots[#slots + 1] = slot
      end
    end
    if #holders(level) == first then return depth, slots, deepest_level end
    levels = levels + 1
    level = levels < max_levels and deepest(1, level, #holders(level)) or 1  -- past the limit the rest hold at least the first block
  end
end
