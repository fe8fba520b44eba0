"""Sampling by one kernel: what the host hands to it gives torch's choices, and the kernel computes them in Triton's interpreter."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.common.report import ROOT
from bench.gpu import interpreter
from tests.worker.execution.planner import make_request

from fairlead_worker.ipc.messages import Sampling, ThinkingBudget
from fairlead_worker.sampling import trial
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import sample
from fairlead_worker.sampling.trial import find_difference, make_fused_sampler
from fairlead_worker.scheduler.request import Request

FUSED = FusedSampler(interpreter.choose_tokens)
VOCABULARY = 700
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {},
    {"temperature": 1e-50},
    {"temperature": 0.7, "top_k": 2**63},
    {"top_k": 5},
    {"top_k": 100, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.01},
    {"logit_bias": ((3, 4.0), (9, -100.0), (5000, 3.0))},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.8, "top_p": 0.95},
    {"temperature": 0, "min_tokens": 9},
    {"allowed_token_ids": (1, 5, 600, 5000), "logprobs": 0},
    {"bad_words": ((3,), (2, 4), (3,))},
    {"allowed_token_ids": (5,), "bad_words": ((5,),)},
    {"thinking": ThinkingBudget(1, (8,), (9,), (10,))},
]


def rows() -> list[Request]:
    made = [make_request(str(row), [7, 8, 7], Sampling(max_tokens=20, seed=row, **each)) for row, each in enumerate(SETTINGS)]
    for request in made:
        request.tokens.extend([3, 3, 2])
        request.stop_tokens = frozenset({0, 4, 5000})
    return made


@pytest.mark.parametrize("ahead", [(), [(4, 3)] * len(SETTINGS)], ids=["no drafts", "drafts"])
def test_the_rows_of_a_step_get_torchs_tokens(ahead: Sequence[Sequence[int]]) -> None:
    logits = torch.randn(len(SETTINGS), VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3
    logits[:, [0, 3, 4]] += 8
    assert sample(logits, rows(), ahead, fused=FUSED) == sample(logits, rows(), ahead)


def test_masks_are_those_of_their_rows_and_tell_where_nothing_is_left() -> None:
    logits = torch.randn(len(SETTINGS), VOCABULARY, generator=torch.Generator().manual_seed(6))
    words = np.random.default_rng(1).integers(0, 2**32, (4, 20), dtype=np.uint32)  # of 640 tokens: those behind them are forbidden
    words[0, 0], words[1], words[3, 0] = 0, 0, 2  # the last one allows token 1 alone
    places = [12, 2, 5, 11]
    here, there = Masks(places, words), Masks(places, words)
    (got, logprobs), (want, expected) = sample(logits, rows(), masks=here, fused=FUSED), sample(logits, rows(), masks=there)
    assert here.dead == there.dead == {2}
    assert [token for row, token in enumerate(got) if row != 2] == [token for row, token in enumerate(want) if row != 2]
    assert logprobs == expected


def test_no_row_gives_no_token() -> None:
    assert sample(torch.empty(0, VOCABULARY), [], fused=FUSED) == ([], [])


def test_the_kernel_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="torch's wheels have it on Linux")
    program = [sys.executable, "-m", "tests.worker.sampling.interpreted"]
    done = subprocess.run(program, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_trial_finds_a_kernel_that_chooses_other_tokens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")

    def following(logits: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, dead = interpreter.choose_tokens(logits, *parts)
        return tokens + 1, dead

    def spoiling(logits: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = interpreter.choose_tokens(logits, *parts)
        logits[0, 0] = 5.0
        return made

    assert find_difference(FUSED, device, 3000, torch.bfloat16) == ""
    assert "18 of 18 tokens" in find_difference(FusedSampler(following), device, 3000, torch.bfloat16)
    assert "leave the logits" in find_difference(FusedSampler(spoiling), device, 3000, torch.bfloat16)
    assert make_fused_sampler(device, 3000, torch.bfloat16) is None and not caplog.text

    def fail() -> None:
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(trial, "load_launch", fail)
    assert make_fused_sampler(torch.device("cuda"), 3000, torch.bfloat16) is None
    assert "uses torch instead of its Triton kernel" in caplog.text and "no C compiler" in caplog.text and "more" not in caplog.text


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs fit a multiprocessor: 64 registers for a thread, and half of the smallest shared memory. The rest is on a stack."""
    triton = pytest.importorskip("triton", reason="torch's wheels have it on Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fairlead_worker.sampling import kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = kernel.choose_tokens
    types = {"tokens": "*i64", "dead": "*i1", "parameters": "*fp64", **dict.fromkeys(("logits", "saved"), "*bf16")}
    types |= dict.fromkeys(("ids", "words", "ends", "groups"), "*i32") | dict.fromkeys(("stride", "vocabulary", "width"), "i32")
    given = {"BLOCKS": 512, "ROWS": kernel.ROWS, "GUESS": kernel.GUESS}
    signature = {name: "constexpr" if name in given else types.get(name, "*fp32") for name in function.arg_names}
    source = ASTSource(function, signature, {(function.arg_names.index(name),): value for name, value in given.items()})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.OPTIONS)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    used = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = (int(found[1]) for name in ("REG", "STACK") if (found := re.search(rf"{name}:(\d+)", used)))
    assert registers <= 64 and stack <= 896 and made.metadata.shared <= 50 << 10
