"""Backends by name."""

import pytest
import torch
from tests.worker.kernels.test_attention import needs_library

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.registry import make_backend

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
    with pytest.raises(ValueError, match="'flashy' is not available here; set --attention-backend to one of: auto, native, cpu, reference"):
        make_backend("flashy", SPEC, 5)
