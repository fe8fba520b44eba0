"""Triton kernel that chooses tokens: edits of logits, masks, temperature, top_k, top_p, min_p and the draw. One program for each row.

It reads a row once, for the largest logit and the sum of each block of tokens. A filter reads once more the tiles that matter: it sums what
certainly stays, and lists groups of tokens with a logit near the threshold. Nothing is sorted. The threshold comes from a search with
pivots, as in FlashInfer's `top_p_renorm_probs` (Ye et al. 2025), over the listed groups alone. The draw inverts the cumulative distribution
of `draw.py`, so that a seed gives the same token. The order of a sum depends on its row alone.
"""

import torch
import triton
import triton.language as tl

from fairlead_worker.model.lowbit.kernels.rows import use_prebuilt_driver

ROWS, GUESS = 32, 128
"""Blocks that a program reads at once, and candidates in a sample from which on the sample tells where the threshold is."""
OPTIONS = {"num_warps": 16, "maxnreg": 64, "enable_fp_fusion": False}
"""Two programs fit a multiprocessor, so that one computes while the other waits."""
WIDTH = tl.constexpr(256)
"""Tokens of a block. A warp reads 8 in each thread, so that the block's sum needs no other warp."""
FIELDS = tl.constexpr(14)
"""Numbers in a row of `parameters`, as `fused.py` writes them."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32."""
EDITS = tl.constexpr(8)
"""Where the borders of a row's four lists of edits begin among them."""
LANES = tl.constexpr(1024)
"""Edits at once."""
SIZE, GROUPS = tl.constexpr(8), tl.constexpr(32)
"""Numbers of a group, which one thread reads, and groups of a block."""
NEAR = tl.constexpr(16)
"""Groups of candidates that are searched at once."""
SAMPLE = tl.constexpr(4096)
"""Logits of a row from which a threshold is guessed."""
CHUNK = tl.constexpr(16)
"""Neighbours in the sample of a row: 32 bytes of bfloat16, which is what the memory reads at least."""


@triton.jit
def _rank(number):
    """Return an int32 that orders as a float32 does."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(rank):
    """Return the float32 of a rank."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _bracket(values, weights, low, high, most, least):
    """Return numbers between `low` and `high` at which those of the values that are not smaller weigh about `most` and `least`."""
    first, last, below, above = low, high, high, low
    for _ in range(8):
        middle, other = (first + below) / 2, (above + last) / 2
        enough = tl.sum(tl.where(values >= middle, weights, 0.0), 0) >= most
        first, below = tl.where(enough, middle, first), tl.where(enough, below, middle)
        enough = tl.sum(tl.where(values >= other, weights, 0.0), 0) >= least
        above, last = tl.where(enough, other, above), tl.where(enough, last, other)
    return first, last


@triton.jit
def _first(cumulative, weights, goal, places):
    """Return the first place whose cumulative weight exceeds `goal`; never one of weight 0."""
    found = tl.min(tl.where((cumulative > goal) & (weights > 0), places, 1 << 30), 0)
    return tl.minimum(found, tl.max(tl.where(weights > 0, places, 0), 0))


@triton.jit
def _read(logits, overlay, words, places, inside, edited, masked, width):
    """Return logits as float32: edited ones, which are NaN in `logits`, from `overlay`; -inf where forbidden or not `inside`."""
    values = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
    if edited:
        changed = values != values
        values = tl.where(changed, tl.load(overlay + places, mask=changed & inside, other=0.0), values)
    if masked:
        word = tl.load(words + places // 32, mask=inside & (places // 32 < width), other=0)
        values = tl.where(((word >> (places % 32)) & 1) != 0, values, float("-inf"))
    return values


@triton.jit
def _read_groups(
    logits, overlay, words, members, filled, start, vocabulary, edited, masked, width, ROWS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Return the logits of some groups of each row of candidates, of which `filled` [ROWS] are set: [ROWS, COUNT, SIZE]."""
    at = start + tl.arange(0, COUNT)[None, :]
    is_set = at < filled[:, None]
    group = tl.load(members + at, mask=is_set, other=0)
    places = group[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    return _read(logits, overlay, words, places, is_set[:, :, None] & (places < vocabulary), edited, masked, width)


@triton.jit
def _search(
    logits, overlay, words, members, filled, vocabulary, edited, masked, width, low, high, target, by_count, top, sharpness,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the largest candidate between `low` and `high` at which those that are not smaller weigh `target`; else the smallest.

    The upper halves of their ranks are searched first: bfloat16 has no others.
    """
    length, limit = tl.max(filled, 0), high
    for shift in tl.static_range(16, -1, -16):
        smallest, greatest = tl.full((ROWS,), high, tl.float32), tl.full((ROWS,), low, tl.float32)
        for start in range(0, length, NEAR):
            near = _read_groups(logits, overlay, words, members, filled, start, vocabulary, edited, masked, width, ROWS, NEAR)
            smallest = tl.minimum(smallest, tl.min(tl.min(tl.where(near >= low, near, high), 2), 1))
            greatest = tl.maximum(greatest, tl.max(tl.max(tl.where(near <= high, near, low), 2), 1))
        low, high = tl.min(smallest, 0), tl.max(greatest, 0)
        first, last = _rank(low) >> shift, _rank(high) >> shift
        while first < last:
            middle = last - (last - first) // 2
            border = _number(middle << shift)
            weights = tl.zeros((ROWS,), tl.float32)
            for start in range(0, length, NEAR):
                near = _read_groups(logits, overlay, words, members, filled, start, vocabulary, edited, masked, width, ROWS, NEAR)
                weight = tl.where(by_count, 1.0, tl.exp2((near - top) * sharpness))
                weights += tl.sum(tl.sum(tl.where((near >= border) & (near <= limit), weight, 0.0), 2), 1)
            enough = tl.sum(weights, 0) >= target
            first, last = tl.where(enough, middle, first), tl.where(enough, last, middle - 1)
        low = tl.maximum(low, _number(first << shift))
        high = tl.minimum(high, _number((first << shift) + ((1 << shift) - 1)))
    return low


@triton.jit
def _edit(logits, overlay, saved, previous, ids, numbers, settings, KIND: tl.constexpr):
    """Move the logits of a list of tokens to `overlay` and change them there: 0 adds biases, 1 penalizes by counts, 2 and 3 forbid."""
    begin, end = tl.load(settings + EDITS + KIND).to(tl.int32), tl.load(settings + EDITS + KIND + 1).to(tl.int32)
    repetition, frequency, presence = (
        tl.load(settings + 4).to(tl.float32),
        tl.load(settings + 5).to(tl.float32),
        tl.load(settings + 6).to(tl.float32),
    )
    for start in range(begin, end, LANES):
        at = start + tl.arange(0, LANES)
        here = at < end
        token = tl.load(ids + at, mask=here, other=0)
        now = tl.load(logits + token, mask=here, other=0.0)
        new = now.to(tl.float32)
        old = tl.load(overlay + token, mask=here & (new != new), other=0.0)
        new = tl.where(new != new, old, new)
        number = tl.load(numbers + at, mask=here, other=0.0)
        if KIND == 0:
            new = new + number
        elif KIND == 1:
            new = tl.where(new > 0, tl.div_rn(new, repetition), new * repetition)
            new = new - frequency * number - tl.where(number > 0, presence, 0.0)
        else:
            new = tl.full((LANES,), float("-inf"), tl.float32)
        tl.store(saved + at, now, mask=here)
        tl.store(previous + at, old, mask=here)
        tl.debug_barrier()  # a token that is named twice is read before it is written
        tl.store(overlay + token, new, mask=here)
        tl.store(logits + token, float("nan"), mask=here)
        tl.debug_barrier()


@triton.jit
def _restore(logits, overlay, saved, previous, ids, begin, end):
    """Undo edits of tokens that no other list names before."""
    for start in range(begin, end, LANES):
        at = start + tl.arange(0, LANES)
        here = at < end
        token = tl.load(ids + at, mask=here, other=0)
        own = tl.load(saved + at, mask=here, other=0.0)
        wide = own.to(tl.float32)
        tl.store(logits + token, own, mask=here & (wide == wide))
        tl.store(overlay + token, tl.load(previous + at, mask=here, other=0.0), mask=here & (wide != wide))


@triton.jit
def choose_tokens(
    logits, tokens, dead, parameters, ids, numbers, words, overlay, saved, previous, stats, ends, groups, running,
    stride, vocabulary, width, BLOCKS: tl.constexpr, ROWS: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """Choose a token of one row of logits [rows, vocabulary]; write it to `tokens` and, for a mask, whether nothing is left to `dead`.

    BLOCKS: a power of 2, at least vocabulary / WIDTH. ROWS: blocks read at once. GUESS: candidates in a sample of the
    row above which the sample tells where the threshold is.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    overlay += row * vocabulary
    maxima = stats + row * 2 * BLOCKS
    sums = maxima + BLOCKS
    ends += row * BLOCKS
    tiles = tl.cdiv(vocabulary, ROWS * WIDTH)
    groups += row * tiles * (ROWS * GROUPS)
    running += row * tiles * (ROWS * GROUPS * 3)
    settings = parameters + row * FIELDS
    edited = tl.load(settings + EDITS + 4) > tl.load(settings + EDITS)
    mask = tl.load(settings + EDITS + 5).to(tl.int32)
    masked = mask >= 0
    words += tl.maximum(mask, 0) * width
    if edited:
        _edit(logits, overlay, saved, previous, ids, numbers, settings, 0)
        _edit(logits, overlay, saved, previous, ids, numbers, settings, 1)
        _edit(logits, overlay, saved, previous, ids, numbers, settings, 2)
        _edit(logits, overlay, saved, previous, ids, numbers, settings, 3)

    tile = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    block = tl.arange(0, BLOCKS)
    in_block = tl.arange(0, WIDTH)
    temperature = tl.load(settings).to(tl.float32)
    is_random = temperature > 0
    sharpness = 1.4426950408889634 / tl.maximum(temperature, 1.17549435e-38)  # for powers of 2
    block_max = tl.full((BLOCKS,), float("-inf"), tl.float32)
    top = tl.max(block_max, 0)
    words_begin, end = tl.load(settings + EDITS + 3).to(tl.int32), tl.load(settings + EDITS + 4).to(tl.int32)
    has_words = end > words_begin
    reading = tl.full((), True, tl.int1)
    while reading:
        for start in range(0, vocabulary, ROWS * WIDTH):
            places = start + tile
            values = _read(logits, overlay, words, places, places < vocabulary, edited, masked, width)
            largest = tl.max(values, 1)
            at = tl.arange(0, ROWS) + start // WIDTH
            tl.store(maxima + at, largest, mask=at < BLOCKS)
            if is_random:
                base = tl.where(largest > float("-inf"), largest, 0.0)
                shares = tl.exp2((values - base[:, None]) * sharpness)
                tl.store(sums + at, tl.sum(shares, 1), mask=at < BLOCKS)
        tl.debug_barrier()
        block_max = tl.load(maxima + block, mask=block * WIDTH < vocabulary, other=float("-inf"))
        top = tl.max(block_max, 0)
        reading = (top == float("-inf")) & has_words
        if reading:  # a bad word is better than no token
            _restore(logits, overlay, saved, previous, ids, words_begin, end)
            tl.debug_barrier()
        has_words = has_words & False
    if masked:
        tl.store(dead + mask, top == float("-inf"))

    token = tl.min(tl.where(block_max == top, block, BLOCKS), 0)
    if is_random:
        scale = tl.exp2((block_max - top) * sharpness)
        block_sum = tl.load(sums + block, mask=block * WIDTH < vocabulary, other=0.0) * scale
        kept = tl.sum(block_sum, 0)  # what top_k keeps; every weight is over the largest one
        block_room = tl.zeros((BLOCKS,), tl.float32)
        cut, cut_weight, needed = float("-inf"), 0.0, 0.0  # of the logits that equal `cut`, only the first `needed` stay
        # Just below what min_p keeps; NaN, which is above nothing, without min_p.
        floor = _number(_rank(tl.minimum(top + temperature * tl.load(settings + 3).to(tl.float32), top)) - 1)
        low, high = LOWEST, top  # the threshold is between them
        first, last = float("inf"), LOWEST  # the candidates are between these
        over = 0.0  # the weight of the logits above the candidates
        stored = tiles * GROUPS
        members = groups + tl.arange(0, ROWS)[:, None] * stored  # groups with candidates, in a list for each row of a tile
        filled = tl.zeros((ROWS,), tl.int32)
        is_filtered = tl.full((), False, tl.int1)
        group_in_tile = tl.arange(0, ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        grid = group_in_tile[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
        for stage in range(3):  # top_k, top_p, min_p
            by_count = stage == 0
            top_k, top_p = tl.load(settings + 1).to(tl.float32), tl.load(settings + 2)
            if tl.where(by_count, top_k < vocabulary, tl.where(stage == 1, top_p < 1.0, floor > cut)):
                target = tl.where(by_count, top_k, (top_p * kept).to(tl.float32))
                is_known = is_filtered & (last >= top)  # the candidates are all from `first` on
                if stage == 2:
                    is_known = is_filtered & (first <= floor) & (floor <= last)
                    if is_known == 0:
                        first, last = float("inf"), floor
                else:
                    low, high = tl.maximum(cut, LOWEST), top
                    if stage == 1:  # tokens below the mean of what top_p drops are dropped; half of it, because sums are rounded
                        rest = tl.log(((1.0 - top_p) * 0.5 * kept / vocabulary).to(tl.float32))
                        low = tl.maximum(low, tl.minimum(top + rest * temperature, top))
                    likeliest = tl.where(by_count, tl.where(block_max > float("-inf"), 1.0, 0.0), scale)
                    if tl.sum(likeliest, 0) >= target:  # the largest logits of blocks reach the target
                        least = tl.min(tl.where(block_max >= low, block_max, top), 0)
                        guess, _ = _bracket(block_max, likeliest, least, top, target, target)
                        low = tl.maximum(low, guess)
                    if is_known == 0:
                        first, last = low, high
                        sample = tl.arange(0, SAMPLE)
                        step = tl.maximum(vocabulary // (SAMPLE // CHUNK), CHUNK)
                        drawn_at = sample // CHUNK * step + sample % CHUNK
                        drawn = _read(logits, overlay, words, drawn_at, drawn_at < vocabulary, edited, masked, width)
                        if (stage == 1) & (tl.sum(tl.where(drawn >= low, 1.0, 0.0), 0) > GUESS):  # many candidates
                            weight = tl.where(drawn >= tl.maximum(cut, LOWEST), tl.exp2((drawn - top) * sharpness), 0.0)
                            whole = tl.sum(weight, 0)
                            share = top_p.to(tl.float32)
                            least = tl.min(tl.where(drawn >= low, drawn, top), 0)
                            guess, _ = _bracket(drawn, weight, least, top, share * whole, share * whole)
                            factor = tl.where(drawn >= guess, 1.0 - share, share) * weight
                            error = 3.0 * tl.sqrt(tl.sum(factor * factor, 0))  # three standard errors
                            first, last = _bracket(drawn, weight, least, top, share * whole + error, share * whole - error)
                            first = tl.where(share * whole + error >= whole, low, first)
                            last = tl.maximum(last, first)
                searching = is_known == 0
                while searching:
                    filled = tl.zeros((ROWS,), tl.int32)
                    row_over, row_within = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
                    for start in range(0, vocabulary, ROWS * WIDTH):
                        at = tl.arange(0, ROWS) + start // WIDTH
                        largest = tl.load(maxima + at, mask=at * WIDTH < vocabulary, other=float("-inf"))
                        above = tl.zeros((ROWS,), tl.float32)
                        if tl.max(largest, 0) >= tl.minimum(first, last):
                            cells = _read(logits, overlay, words, start + grid, start + grid < vocabulary, edited, masked, width)
                            shares = tl.exp2((cells - top) * sharpness)
                            above = tl.sum(tl.sum(tl.where(cells > last, shares, 0.0), 2), 1)
                            row_over += above
                            row_within += tl.sum(tl.sum(tl.where(cells >= first, shares, 0.0), 2), 1)
                            greatest = tl.max(tl.where(cells <= last, cells, float("-inf")), 2)
                            has_member = (greatest >= first).to(tl.int32)
                            slot = filled[:, None] + tl.cumsum(has_member, 1) - 1
                            tl.store(members + slot, group_in_tile + start // SIZE, mask=has_member > 0)
                            filled += tl.sum(has_member, 1)
                        tl.store(sums + at, above, mask=at < BLOCKS)
                        tl.store(ends + at, filled, mask=at < BLOCKS)
                    tl.debug_barrier()
                    over = tl.sum(row_over, 0)
                    is_above = (over >= target) & (last < high)
                    is_below = (over < target) & (tl.sum(row_within, 0) < target) & (first > low)
                    searching = (stage == 1) & (is_above | is_below)  # the guess was wrong
                    if searching:
                        low = tl.where(is_above, _number(_rank(last) + 1), low)
                        high = tl.where(is_above, high, _number(_rank(first) - 1))
                        first, last = low, high
                is_filtered = is_filtered | True
                if stage == 2:
                    cut, needed = floor, 0.0
                else:
                    low = tl.maximum(first, low)
                    new = _search(
                        logits, overlay, words, members, filled, vocabulary, edited, masked, width,
                        low, last, target - over, by_count, top, sharpness, ROWS,
                    )  # fmt: skip
                    row_over, equal, count = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
                    for start in range(0, tl.max(filled, 0), NEAR):
                        near = _read_groups(logits, overlay, words, members, filled, start, vocabulary, edited, masked, width, ROWS, NEAR)
                        is_over = (near > new) & (near <= last)
                        row_over += tl.sum(tl.sum(tl.where(is_over, tl.exp2((near - top) * sharpness), 0.0), 2), 1)
                        count += tl.sum(tl.sum(is_over.to(tl.float32), 2), 1)
                        equal += tl.sum(tl.sum((near == new).to(tl.float32), 2), 1)
                    reached, alike = over + tl.sum(row_over, 0), tl.sum(equal, 0)
                    cut_weight = tl.exp2((new - top) * sharpness)
                    missing = tl.where(cut_weight > 0, tl.ceil((target - reached) / cut_weight), alike)
                    missing = tl.where(by_count, target - tl.sum(count, 0), missing)
                    missing = tl.minimum(tl.maximum(missing, 1.0), alike)
                    needed = tl.where(new == cut, tl.minimum(needed, missing), missing)
                    cut = new
                    if by_count:
                        kept = reached + needed * cut_weight
        if is_filtered:  # add the candidates that stay to their blocks, by running sums over the groups
            row_over, equal, count = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
            for start in range(0, tl.max(filled, 0), NEAR):
                near = _read_groups(logits, overlay, words, members, filled, start, vocabulary, edited, masked, width, ROWS, NEAR)
                is_over = (near > cut) & (near <= last)
                of_group = tl.sum(tl.where(is_over, tl.exp2((near - top) * sharpness), 0.0), 2)
                equal_of_group = tl.sum((near == cut).to(tl.float32), 2)
                count_of_group = tl.sum(is_over.to(tl.float32), 2)
                at_group = start + tl.arange(0, NEAR)[None, :]
                to = running + tl.arange(0, ROWS)[:, None] * stored + at_group
                is_set = at_group < filled[:, None]
                tl.store(to, row_over[:, None] + tl.cumsum(of_group, 1), mask=is_set)
                tl.store(to + ROWS * stored, equal[:, None] + tl.cumsum(equal_of_group, 1), mask=is_set)
                tl.store(to + 2 * ROWS * stored, count[:, None] + tl.cumsum(count_of_group, 1), mask=is_set)
                row_over += tl.sum(of_group, 1)
                equal += tl.sum(equal_of_group, 1)
                count += tl.sum(count_of_group, 1)
            tl.debug_barrier()
            is_read = block < tiles * ROWS
            block_end = tl.load(ends + block, mask=is_read, other=0)
            block_begin = tl.load(ends + block - ROWS, mask=is_read & (block >= ROWS), other=0)
            to_end = running + block % ROWS * stored + block_end - 1
            to_begin = running + block % ROWS * stored + block_begin - 1
            block_sum = tl.load(to_end, mask=block_end > 0, other=0.0) - tl.load(to_begin, mask=block_begin > 0, other=0.0)
            to_end += ROWS * stored
            to_begin += ROWS * stored
            block_equal = tl.load(to_end, mask=block_end > 0, other=0.0) - tl.load(to_begin, mask=block_begin > 0, other=0.0)
            to_end += ROWS * stored
            to_begin += ROWS * stored
            block_count = tl.load(to_end, mask=block_end > 0, other=0.0) - tl.load(to_begin, mask=block_begin > 0, other=0.0)
            block_sum = tl.where(block_count > 0, tl.maximum(block_sum, 0.0), 0.0) + tl.load(sums + block, mask=is_read, other=0.0)
            block_room = tl.minimum(tl.maximum(needed - (tl.cumsum(block_equal, 0) - block_equal), 0.0), block_equal)
        totals = block_sum.to(tl.float64) + block_room.to(tl.float64) * cut_weight
        cumulative = tl.cumsum(totals, 0)
        goal = tl.load(settings + 7) * tl.max(cumulative, 0)
        token = _first(cumulative, totals, goal, block)
        near_at = token * WIDTH + in_block
        own = _read(logits, overlay, words, near_at, near_at < vocabulary, edited, masked, width)
        own_shares = tl.exp2((own - top) * sharpness)
        if is_filtered:
            same = (own == cut).to(tl.float32)
            is_kept = (same > 0) & (tl.cumsum(same, 0) <= tl.sum(tl.where(block == token, block_room, 0.0), 0))
            own_shares = tl.where((own > cut) | is_kept, own_shares, 0.0)
        own_weights = own_shares.to(tl.float64)
        before = tl.sum(tl.where(block == token, cumulative - totals, 0.0), 0)
        part = (goal - before) / tl.sum(tl.where(block == token, totals, 0.0), 0)
        inner = tl.cumsum(own_weights, 0)
        token = token * WIDTH + _first(inner, own_weights, tl.minimum(tl.maximum(part, 0.0), 1.0) * tl.max(inner, 0), in_block)
    else:
        near_at = token * WIDTH + in_block
        own = _read(logits, overlay, words, near_at, near_at < vocabulary, edited, masked, width)
        token = tl.min(tl.where(own == top, near_at, vocabulary), 0)
    tl.store(tokens + row, tl.minimum(token, vocabulary - 1).to(tl.int64))
    tl.debug_barrier()
    if edited:
        _restore(logits, overlay, saved, previous, ids, tl.load(settings + EDITS).to(tl.int32), tl.load(settings + EDITS + 4).to(tl.int32))


def launch(
    logits: torch.Tensor,
    parameters: torch.Tensor,
    ids: torch.Tensor,
    numbers: torch.Tensor,
    words: torch.Tensor,
    rows: int = ROWS,
    guess: int = GUESS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `fused.Launch`. `rows`: a power of 2."""
    use_prebuilt_driver()
    (count, vocabulary), device = logits.shape, logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = max(triton.next_power_of_2(triton.cdiv(vocabulary, WIDTH.value)), rows)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    dead = torch.empty(len(words), dtype=torch.bool, device=device)
    overlay, previous = (torch.empty(size, device=device) for size in ((count if len(ids) else 0) * vocabulary, len(ids)))
    stats = torch.empty(count, 2, blocks, device=device)
    ends = torch.empty(count, blocks, dtype=torch.int32, device=device)
    tiles = triton.cdiv(vocabulary, rows * WIDTH.value)
    groups = torch.empty(count, tiles * rows * GROUPS.value, dtype=torch.int32, device=device)
    running = torch.empty(count, 3, tiles * rows * GROUPS.value, device=device)
    saved = torch.empty(len(ids), dtype=logits.dtype, device=device)
    sizes = {"BLOCKS": blocks, "ROWS": rows, "GUESS": guess, **OPTIONS}
    edits = (parameters, ids, numbers, words, overlay, saved, previous)
    choose_tokens[(count,)](
        logits, tokens, dead, *edits, stats, ends, groups, running, logits.stride(0), vocabulary, words.shape[1], **sizes
    )
    return tokens, dead
