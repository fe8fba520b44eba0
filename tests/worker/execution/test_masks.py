"""Masks on rows of logits: the host's way and the device's are one."""

import numpy as np
import pytest
import torch

from fairlead_worker.execution.masks import Masks, unpack

VOCABULARY = 75  # of which two words hold 64: what is behind them is forbidden


@pytest.mark.parametrize("places", [[0, 1, 2], [4, 2], [3]])
def test_both_ways_forbid_the_same_and_tell_where_nothing_is_left(places: list[int]) -> None:
    chance = np.random.default_rng(5)
    words = chance.integers(0, 2**32, (len(places), 2), dtype=np.uint32)
    if len(places) > 1:
        words[1] = 0
    logits = torch.from_numpy(chance.standard_normal((3 if places == [0, 1, 2] else 5, VOCABULARY), dtype=np.float32))
    before, positions = logits.clone(), list(range(len(logits)))

    here, there = Masks(places, words), Masks(places, words)
    masked = here.apply(logits, positions)
    assert torch.equal(logits, before), "others read these logits too"
    assert torch.equal(masked, there._on_device(logits, places))
    assert here.dead == there.dead == set(places[1:2])
    for place, allowed in zip(places, unpack(words, VOCABULARY, logits.device), strict=True):
        if place not in here.dead:
            assert torch.equal(masked[place] > float("-inf"), allowed)
    untouched = [row for row in positions if row not in places]
    assert torch.equal(masked[untouched], before[untouched])
