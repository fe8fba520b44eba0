"""FlashInfer's kernels for top_k and top_p, interpreted: tokens are those of a stable sort, also among equal logits, in any batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bench.gpu import interpreter
from tests.worker.sampling.test_sampler import requests

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling import device_filters
from fairlead_worker.sampling.device_filters import DeviceFilters, _difference, make_device_filters
from fairlead_worker.sampling.draw import draw
from fairlead_worker.sampling.filters import keep_sorted
from fairlead_worker.sampling.sampler import sample

FILTERS = DeviceFilters(interpreter)  # type: ignore[arg-type]  # a module
SETTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 300, "top_p": 0.95},
    {"top_p": 1e-9},
    {"top_p": 1e-50},
    {"top_p": 0.3},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.9, "min_p": 0.3},
    {"top_p": 0.99, "temperature": 4.0, "min_p": 0.02},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {},
]


def scale(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    return (logits - logits.amax(1, keepdim=True)) / torch.tensor([s.temperature for s in samplings])[:, None]


@pytest.mark.parametrize("vocabulary", [500, 700, 5003])
@pytest.mark.parametrize("equal", [0.0, 0.5, 2.0], ids=["no equal logits", "some equal logits", "most logits are equal"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_token_is_that_of_a_stable_sort(setting: dict[str, Any], equal: float, vocabulary: int) -> None:
    """The noise inverts the cumulative distribution of what the sort leaves, in vocabulary order."""
    torch.manual_seed(1)
    rows = 60
    logits = torch.randn(rows, vocabulary) * 2
    if equal:
        logits = (logits / equal).round() * equal
    samplings = [Sampling(max_tokens=1, **setting)] * rows
    noise = torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64)
    tokens = draw(logits, samplings, noise, FILTERS)
    left = keep_sorted(scale(logits, samplings), samplings).softmax(1, dtype=torch.float64)
    upper = left.cumsum(1).gather(1, tokens[:, None])[:, 0]
    share = left.gather(1, tokens[:, None])[:, 0]
    assert (share > 0).all(), "a dropped token was drawn"
    assert ((upper - share - 1e-6 <= noise) & (noise <= upper + 1e-6)).all()


def test_of_equal_logits_the_first_ones_stay() -> None:
    """Each filter cuts a group of equal logits that lies in three blocks of the vocabulary."""
    logits = torch.full((1, 2000), -20.0)
    places = [3, 500, 511, 512, 700, 1999]
    logits[0, places], logits[0, 900] = 1.0, 2.0
    weights = torch.tensor([1.0] * 6).exp()
    total = weights.sum().item() + torch.tensor(2.0).exp().item()
    share = weights[0].item() / total
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"top_k": 1}, [900]),
        ({"top_k": 3}, [3, 500, 900]),
        ({"top_p": 0.01}, [900]),
        ({"top_p": 1 - 5.5 * share}, [3, 900]),
        ({"top_p": 1 - 2.5 * share}, [3, 500, 511, 512, 900]),
        ({"top_p": 1 - 2.5 * share, "min_p": 0.5}, [900]),
        ({"top_k": 4, "top_p": 0.9999}, [3, 500, 511, 900]),
    ]
    for setting, expected in cases:
        noise = torch.linspace(0, 1 - 2**-53, 400, dtype=torch.float64)
        tokens = draw(logits.expand(400, -1), [Sampling(max_tokens=1, **setting)] * 400, noise, FILTERS)
        assert sorted(set(tokens.tolist())) == expected, setting


@pytest.mark.parametrize("equal", [0.0, 0.25], ids=["no equal logits", "equal logits"])
@pytest.mark.parametrize("vocabulary", [700, 5003])
def test_a_row_chooses_the_same_alone_and_in_any_company(vocabulary: int, equal: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(len(SETTINGS), vocabulary) * 2
    if equal:
        logits = (logits / equal).round() * equal
    samplings = [Sampling(max_tokens=1, seed=i, **setting) for i, setting in enumerate(SETTINGS)]
    together, _ = sample(logits, requests(samplings), filters=FILTERS)
    backwards, _ = sample(logits.flip(0), requests(samplings[::-1]), filters=FILTERS)
    alone = [sample(logits[i : i + 1], requests([s]), filters=FILTERS)[0][0] for i, s in enumerate(samplings)]
    assert together == backwards[::-1] == alone


def test_the_choice_is_that_of_the_cpu() -> None:
    torch.manual_seed(3)
    logits = torch.randn(20 * len(SETTINGS), 3000) * 2
    samplings = [Sampling(max_tokens=1, seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(len(logits))]
    assert sample(logits, requests(samplings), filters=FILTERS)[0] == sample(logits, requests(samplings))[0]


@pytest.mark.parametrize("logit", [float("nan"), float("-inf")])
def test_logits_without_a_likely_token_give_a_token_of_the_vocabulary(logit: float) -> None:
    for setting in SETTINGS:
        (token,), _ = sample(torch.full((1, 700), logit), requests([Sampling(max_tokens=1, **setting)]), filters=FILTERS)
        assert token in range(700)


class Wrong:
    """FlashInfer with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def top_k(self, input: torch.Tensor, k: int, **modes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault == "broken":
            raise RuntimeError("ninja: build stopped\nmore")
        values, tokens = interpreter.top_k(input, k, **modes)
        return (values, tokens.flip(1)) if self.fault == "top_k" else (values, tokens)

    def top_p_renorm_probs(self, probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool) -> torch.Tensor:
        kept = interpreter.top_p_renorm_probs(probs, top_p, is_deterministic)
        return torch.where(kept > kept.amax(1, keepdim=True) / 2, kept, 0.0) if self.fault == "top_p" else kept


def test_the_trial_finds_kernels_that_choose_other_tokens() -> None:
    device = torch.device("cpu")
    assert _difference(FILTERS, device) == ""
    assert "top_k" in _difference(DeviceFilters(Wrong("top_k")), device)
    assert "top_p" in _difference(DeviceFilters(Wrong("top_p")), device)


def test_torch_takes_over_with_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    assert make_device_filters(torch.device("cpu")) is None and not caplog.text
    monkeypatch.setattr(device_filters.flashinfer_library, "library", lambda: None)
    assert make_device_filters(device) is None, "its reason is in the log of the library"
    monkeypatch.setattr(device_filters.flashinfer_library, "library", lambda: Wrong("broken"))
    monkeypatch.setattr(device_filters, "_difference", lambda filters, _: _difference(filters, torch.device("cpu")))
    assert make_device_filters(device) is None
    assert "use torch instead of FlashInfer's kernels" in caplog.text and "ninja: build stopped" in caplog.text


def test_a_start_does_not_wait_for_compilers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device_filters.flashinfer_library, "library", lambda: interpreter)
    monkeypatch.setattr(device_filters, "_difference", lambda filters, _: _difference(filters, torch.device("cpu")))
    assert make_device_filters(torch.device("cuda")) is not None
    monkeypatch.setattr(device_filters, "uncompiled_modules", lambda: ["topk"])
    assert make_device_filters(torch.device("cuda")) is None
    assert "topk not compiled, see `python -m fairlead_worker.kernels.prebuild`" in caplog.text
