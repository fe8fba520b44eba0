"""How many slots there are for recurrent states, and how rows with snapshots are cut."""

import pytest
import torch

from fairlead_worker.cache.states import ZEROS, RowState, StateSlots
from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.states import StateSpec, count_slots, plan_waves

MIB = 1 << 20
STATE = (StateSpec(((256, 1024),), (torch.float32,)),)
"""1 MiB."""
KV = KVSpec((LayerSpec(1, 1, 64, 64, 1.0),), 16, torch.float32, torch.device("cpu"))
"""8 KiB a page."""
NO_KV = KVSpec((), 16, torch.float32, torch.device("cpu"))


def test_states_get_half_of_the_memory_and_running_requests_half_of_the_slots() -> None:
    assert count_slots(STATE, KV, 256, 0, 104 * MIB) == StateSlots(25, 50, MIB)
    assert count_slots(STATE, KV, 8, 0, 104 * MIB) == StateSlots(8, 50, MIB), "the rest is for snapshots"
    assert count_slots(STATE, NO_KV, 256, 0, 104 * MIB) == StateSlots(51, 102, MIB), "there is nothing else to keep"
    assert count_slots(STATE, KV, 256, 8, 104 * MIB) == StateSlots(42, 50, MIB), "as many snapshots as set, and fewer requests"
    small = (StateSpec(((4,),), (torch.float32,)),)
    assert count_slots(small, KV, 8, 0, 16 * MIB).total == 8 + 1024, "one snapshot for each page"
    assert count_slots(STATE, KV, 8, 5, 0) == StateSlots(8, 13, MIB) and count_slots(STATE, KV, 8, 0, 0) == StateSlots(8, 16, MIB)
    with pytest.raises(ValueError, match="no memory for recurrent states"):
        count_slots(STATE, KV, 8, 0, 4 * MIB)
    with pytest.raises(ValueError, match="room for 53 of them"):
        count_slots(STATE, KV, 8, 50, 104 * MIB)


def test_rows_of_one_length_run_together_and_a_row_is_cut_at_its_snapshots() -> None:
    counts, states = [1, 7, 1, 4], [RowState(0, 0), RowState(1, ZEROS, ((4, 8), (6, 9))), RowState(2, 7, ((1, 5),)), None]
    nothing = torch.zeros(0, dtype=torch.int32)
    step = PackedStep(torch.zeros(13), nothing, nothing, [0] * 4, counts, nothing, nothing, nothing, states=states)
    waves = [[_shown(group) for group in wave] for wave in plan_waves(step, 99)]
    assert waves == [
        [([0, 8], [0, 7], [(0, 0), (1, 2), (1, 5)]), ([1, 2, 3, 4, 9, 10, 11, 12], [99, 99], [(0, 8)])],
        [([5, 6], [8], [(0, 9)])],
        [([7], [9], [(0, 1)])],
    ]


def test_the_tokens_of_a_row_that_speculates_run_one_after_the_other() -> None:
    """Beside a decode and a chunk. The second one's state is kept as a snapshot too."""
    singles = RowState(7, 1, ((2, 9),), (5, 6, 7)).singles(3)
    states, nothing = [RowState(0, 0), *singles, RowState(2, ZEROS)], torch.zeros(0, dtype=torch.int32)
    step = PackedStep(torch.zeros(6), nothing, nothing, [0] * 5, [1, 1, 1, 1, 2], nothing, nothing, nothing, states=states)
    assert [[_shown(group) for group in wave] for wave in plan_waves(step, 99)] == [
        [([0, 1], [0, 1], [(0, 0), (1, 5)]), ([4, 5], [99], [(0, 2)])],
        [([2], [5], [(0, 6), (0, 9)])],
        [([3], [6], [(0, 7)])],
    ]


def _shown(group) -> tuple[list[int], list[int], list[tuple[int, int]]]:  # type: ignore[no-untyped-def]
    """Its tokens, the slots that it starts from, and the (row, slot) that it keeps."""
    return group.tokens.tolist(), group.sources.tolist(), list(zip(group.kept.tolist(), group.targets.tolist(), strict=True))
