"""The host tier's KV: pages are saved and loaded bit for bit, on every backend."""

import logging

import pytest
import torch
from tests.worker.kernels.test_attention import needs_library, packed

from fairlead_worker.execution.host import PlainHostStore, _pin, make_host_store
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.registry import BACKENDS, make_backend

LAYERS = (LayerSpec(4, 2, 8, 8, 1.0), LayerSpec(4, 1, 16, 4, 1.0, window=3), LayerSpec(4, 4, 4, 4, 1.0))
SPEC = KVSpec(LAYERS, 5, torch.bfloat16, torch.device("cpu"))
every_backend = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_library if name == "native" else ()) for name in BACKENDS if name != "flashinfer"],
)
"""FlashInfer's pages are the reference's."""


def filled(name: str, pages: int = 7):
    backend = make_backend(name, SPEC, pages)
    torch.manual_seed(0)
    for part in (*backend.keys, *backend.values):
        part.normal_()
    return backend


@every_backend
def test_pages_are_read_and_written_whole(name: str) -> None:
    backend = filled(name)
    every = backend.read_pages(torch.arange(7))
    assert every.shape == (7, SPEC.page_bytes // SPEC.dtype.itemsize)
    assert len({tuple(page.tolist()) for page in every}) == 7
    backend.write_pages(torch.tensor([6, 2]), backend.read_pages(torch.tensor([3, 4])))
    assert torch.equal(backend.read_pages(torch.arange(7)), every[[0, 1, 4, 3, 4, 5, 3]])


@every_backend
def test_what_a_page_holds_is_its_tokens(name: str) -> None:
    """A page copied to another one serves a request as the first did."""
    backend = filled(name)
    backend.write_pages(torch.tensor([5]), backend.read_pages(torch.tensor([1])))
    outputs = []
    for page in (1, 5):
        step = packed([(4, 1)], [[page]], 5)
        torch.manual_seed(1)
        context = backend.plan(step)
        for layer, spec in enumerate(LAYERS):
            shapes = ((spec.heads, spec.key_dim), (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim))
            outputs.append(context.attend(layer, *(torch.randn(1, *shape, dtype=SPEC.dtype) for shape in shapes)))
    assert all(torch.equal(one, other) for one, other in zip(outputs[:3], outputs[3:], strict=True))


@every_backend
def test_saves_come_before_loads(name: str) -> None:
    backend = filled(name)
    store = PlainHostStore(backend, 4)
    before = backend.read_pages(torch.arange(7))
    store.copy([(1, 3), (2, 0)], [(2, 3), (6, 0)])
    assert torch.equal(backend.read_pages(torch.arange(7)), before[[0, 1, 1, 3, 4, 5, 2]])
    store.copy([], [(0, 3)])
    store.copy([], [])
    assert torch.equal(backend.read_pages(torch.arange(7)), before[[1, 1, 1, 3, 4, 5, 2]]), "slots keep what they hold"


def test_on_a_cpu_the_tier_is_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = make_backend("auto", SPEC, 3)
    assert make_host_store(backend, 0) is None and not caplog.text
    with caplog.at_level(logging.WARNING):
        assert make_host_store(backend, 1 << 30) is None
    assert "--host-kv-cache-bytes 1073741824 is ignored: on a CPU" in caplog.text and "--kv-cache-memory-bytes" in caplog.text


def test_pinned_memory_is_unpinned_before_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is called and when: there is no driver here."""
    said: list[tuple[str, int]] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            said.append(("register", address))
            return 0 if size > 4 else 2

        def cudaHostUnregister(self, address: int) -> int:
            said.append(("unregister", address))
            return 0

    class Owner:
        """Of a host tier."""

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append(("wait", 0)))
    owner, records = Owner(), torch.zeros(4)
    address = records.data_ptr()
    _pin(owner, records)
    del records
    assert said == [("register", address)]
    del owner
    assert said[1:] == [("wait", 0), ("unregister", address)]
    with pytest.raises(RuntimeError, match="the 4 bytes of the host tier could not be pinned"):
        _pin(Owner(), torch.zeros(1))
