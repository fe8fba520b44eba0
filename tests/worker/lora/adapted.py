"""A model with LoRA adapters of several ranks on several layers, whose decodes are graphs. Fixtures for tests to import."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from bench.gpu.models.adapters import write_adapter
from tests.worker.execution.replayed import KERNELS, Replayed, filled_backend
from tests.worker.model.fusing import TEXT

from fairlead.random_model import make_model
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.fuse import KINDS, fuse_layers
from fairlead_worker.model.loader import LoadedModel, load_model

TOLERANCE = 0.006
"""Of logits around 0.1 to 1 in float16, whose last bit is up to 0.0005. A CPU with AVX512-FP16 multiplies one row in another order than
several, and the logits of such steps differ by up to 0.004."""
SHAPES: list[dict[str, object]] = [
    {"rank": 4},
    {"rank": 7, "targets": ("q_proj", "down_proj")},
    {"rank": 8, "targets": ("v_proj", "gate_proj", "o_proj")},
    {"rank": 1, "targets": ("up_proj",)},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("adapted") / "llama"
    make_model(folder, arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=2, vocab=500)
    made = load_model(str(folder), dtype="float16")
    dense = tuple(kind for kind in KINDS if kind not in ("experts", "sums"))
    assert fuse_layers(made.model, KERNELS, made.max_model_len, TEXT) == dense
    return made


@pytest.fixture(scope="module")
def folders(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(loaded, root / str(number), number, scale=0.2, **shape) for number, shape in enumerate(SHAPES)]  # type: ignore[arg-type]  # each its own


class World:
    """A model whose decodes of up to 12 rows are graphs, with adapters by number."""

    def __init__(self, loaded: LoadedModel, folders: Sequence[Path], most: int) -> None:
        self.folders = folders
        self.adapters = AdapterSet(loaded, most, 8)
        self.adapters.allocate_slots()
        self.eager = ModelRunner(loaded, filled_backend(loaded), adapters=self.adapters)
        self.graphed = ModelRunner(loaded, filled_backend(loaded), adapters=self.adapters)
        self.recorder = Replayed()
        self.graphed.graphs = graphs_for(self.graphed.forward, self.graphed.backend, 12, 100, self.recorder, self.adapters.slots)
        assert self.graphed.graphs is not None
        self.graphed.graphs.capture()

    def load(self, number: int, shape: int) -> None:
        self.adapters.load(number, f"a{number}", "file:///a", self.folders[shape])

    def replay(self, step: PackedStep) -> torch.Tensor:
        assert self.graphed.graphs is not None
        logits = self.graphed.graphs.run(step)
        assert logits is not None, "a graph does it"
        return logits.clone()

    def check(self, step: PackedStep) -> None:
        """The graph says what the layers' hooks say, and stores the same keys and values."""
        expected, replayed = self.eager.run(step), self.replay(step)
        torch.testing.assert_close(replayed, expected, rtol=0, atol=TOLERANCE)
        for mine, theirs in zip(self.graphed.backend.keys, self.eager.backend.keys, strict=True):  # type: ignore[attr-defined]  # FlashInfer's
            torch.testing.assert_close(mine[:-1], theirs[:-1], rtol=0, atol=2 * TOLERANCE)


@pytest.fixture
def world(loaded: LoadedModel, folders: list[Path]) -> Iterator[World]:
    made = World(loaded, folders, 3)
    with torch.inference_mode():
        yield made
    for number in list(made.adapters.infos):
        made.adapters.unload(number)
