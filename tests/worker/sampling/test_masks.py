"""Masks on rows of logits: the host's and the device's implementations agree."""

import numpy as np
import pytest
import torch
from tests.worker.execution.planner import make_request
from tests.worker.execution.waits import NoWaiting

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.masks import Masks, unpack
from fairlead_worker.sampling.sampler import choose, gather_logprobs

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


@torch.inference_mode()
def test_on_a_device_nothing_waits_until_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, penalties, bans, filters and log-probabilities are launched; a `top_p` without `top_k` alone looks at what came out."""
    monkeypatch.setattr(Masks, "_on_host", Masks._on_device)
    settings: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": ((9, 3.0),)},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"top_k": 300, "top_p": 0.9},
        {"allowed_token_ids": (1, 2, 70), "bad_words": ((5,), (6, 7))},
        {"min_tokens": 4, "stop_token_ids": (3, 4)},
    ]
    requests = [make_request(str(i), range(5), Sampling(max_tokens=9, seed=1, **each)) for i, each in enumerate(settings)]  # type: ignore[arg-type]  # each its own
    words = np.full((2, 3), 2**32 - 1, np.uint32)
    words[1] = 0
    logits = torch.randn(6, VOCABULARY)
    here, there = Masks([0, 2], words), Masks([0, 2], words)
    expected = choose(logits, requests, masks=here)
    drawn = [make_request("p", range(5), Sampling(max_tokens=9, top_p=0.9))]
    with NoWaiting():
        tokens = choose(logits, requests, masks=there)
        asked = gather_logprobs(logits, tokens, requests)
        assert asked is not None
        told = asked.fetch()
        with pytest.raises(AssertionError, match="waits"):
            choose(logits[:1], drawn)
        with pytest.raises(AssertionError, match="waits"):
            told()
    assert torch.equal(tokens, expected) and there.dead == here.dead == {2}
    assert len(told()[0][0].top_ids) == 3
