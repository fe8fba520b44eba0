-- How deep each living slot holds a chain of hashes. Shared by `match` and `route`.
--
-- A slot's set of blocks is prefix-closed (parents are stored first, children removed first, batches are atomic), so the sets of *living* holders only
-- shrink with depth: binary-search the deepest block that anyone holds, then each depth where the set grows. Dead slots are filtered before every
-- comparison: one that is half swept is not closed any more and would mislead the search. `live[slot]` is true-ish of the living.
local function match(p, hashes, live, max_levels)
  local count = #hashes / 8
  local buckets = buckets_of(p)
  if count == 0 or buckets == 0 then return {}, 0 end
  local sets, levels_seen = { [''] = {} }, {}

  local function wide_holders(map)
    local found, count = {}, 0
    for at = 1, #map do
      local bits, n = byte(map, at), at * 8 - 1
      while bits > 0 do
        if bits % 2 == 1 then
          local slot = char(floor(n / 256), n % 256)
          if live[slot] then
            count = count + 1
            found[count] = slot
          end
          bits = bits - 1
        end
        bits, n = bits / 2, n - 1
      end
    end
    return found
  end

  local function narrow_holders(packed)
    local found = {}
    for i = 1, #packed, 2 do
      local slot = sub(packed, i, i + 1)
      if live[slot] then found[#found + 1] = slot end
    end
    return found
  end

  local bucket = p .. 'b'
  local function holders(level)
    local found = levels_seen[level]
    if found then return found end
    local at = (level - 1) * 8 + 1
    local hash = sub(hashes, at, at + 7)
    local a, b = byte(hash, 1, 2)
    local n = (a * 256 + b) % buckets
    local packed = call('HGET', bucket .. char(floor(n / 256), n % 256), hash) or ''
    local wide = packed == WIDE
    if wide then packed = WIDE .. (call('GET', p .. 'w' .. hash) or '') end
    found = sets[packed]  -- neighbours mostly have equal sets: read each once
    if not found then
      found = wide and wide_holders(sub(packed, 2)) or narrow_holders(packed)
      sets[packed] = found
    end
    levels_seen[level] = found
    return found
  end

  -- The deepest level in [low, high) whose holders outnumber `size`, given that `low` does.
  local function deepest(low, high, size)
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      if #holders(middle) > size then low = middle else high = middle end
    end
    return low
  end

  local depth, first = {}, #holders(1)
  if first == 0 then return depth, 0 end
  local level = deepest(1, count + 1, 0)
  local deepest_level, levels = level, 1
  while true do
    for _, slot in ipairs(holders(level)) do
      if not depth[slot] then depth[slot] = level end
    end
    if #holders(level) == first then return depth, deepest_level end
    levels = levels + 1
    level = levels < max_levels and deepest(1, level, #holders(level)) or 1  -- past the limit the rest hold at least the first block
  end
end
