"""Choice of backends by name."""

from dataclasses import replace

import pytest
import torch
from bench.gpu import interpreter
from tests.worker.kernels.test_attention import needs_library

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.registry import choose_backend, make_backend

SPEC = KVSpec((LayerSpec(2, 1, 8, 8, 1.0),), 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        pytest.param("auto", "native", marks=needs_library),
        pytest.param("native", "native", marks=needs_library),
        ("cpu", "cpu"),
        ("reference", "reference"),
    ],
)
def test_a_known_name_gives_storage(name: str, chosen: str) -> None:
    backend = make_backend(name, SPEC, 5)
    assert (backend.name, backend.pages, backend.spec) == (chosen, 5, SPEC)


def test_an_unknown_name_says_what_there_is() -> None:
    every = "auto, flashinfer, native, cpu, reference"
    with pytest.raises(ValueError, match=f"'flashy' is not available here; set --attention-backend to one of: {every}"):
        make_backend("flashy", SPEC, 5)


def test_a_gpu_gets_flashinfer_where_it_is_installed_and_does_some_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    served = replace(SPEC, layers=(LayerSpec(8, 2, 64, 64, 1.0), *SPEC.layers), dtype=torch.bfloat16, device=torch.device("cuda"))
    monkeypatch.setattr("fairlead_worker.kernels.registry.library", lambda: interpreter)
    assert choose_backend(served)[0] == "flashinfer"
    assert choose_backend(replace(served, dtype=torch.float32))[0] == "reference", "its kernels are of 16 bits"
    assert choose_backend(replace(served, layers=SPEC.layers))[0] == "reference", "heads of 8"
    latents = replace(served, layers=(LayerSpec(16, 1, 576, 512, 1.0, value_in_key=True),))
    assert choose_backend(latents) == ("flashinfer", "")
    monkeypatch.setattr("fairlead_worker.kernels.registry.library", lambda: None)
    assert choose_backend(served)[0] == "reference"
