"""LoRA adapters of a loaded model: one packed forward pass serves any number of them, each on its own tokens.

A hook on a linear layer adds `up @ (down @ x)` to the layer's output, adapter by adapter over the tokens of each in the step. So one
pass serves requests of several adapters and of none (an idea of Punica, Chen et al. 2023, and S-LoRA, Sheng et al. 2023). On stacked
projections the hook is on the slice that replaces one of them. A layer without adapters has no hook.

If decodes run as CUDA graphs, the matrices are in the slots that graphs read (`lora/slots.py`), and the hooks here use views of them.

Each rank of a sharded model has a part of each adapter (`files.part_of`), and loads and unloads it at the same point between the same
steps. An adapter that one rank cannot load is loaded on none.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fairlead_worker.errors import AdapterError
from fairlead_worker.ipc.messages import AdapterChanged, AdapterInfo, FetchAdapter, LoadAdapter, UnloadAdapter
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.lora.files import AdapterFiles, Pair, part_of, read_adapter
from fairlead_worker.lora.layers import adaptable_layers, orders_of, site_of, sizes_of, unsupported_reason
from fairlead_worker.lora.slots import AdapterSlots
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.packed import DTYPES, maker_for
from fairlead_worker.model.trial import TRIAL_TOKENS, trial_logits
from fairlead_worker.sharding.group import Group

logger = logging.getLogger(__name__)

PROFILE_ADAPTER = -1
"""Number of a temporary adapter that exists only for memory profiling and has no requests."""


class Segment(NamedTuple):
    """The tokens of one adapter in a step."""

    adapter: int
    tokens: torch.Tensor | None
    """[n] int64, on the model's device; None: all tokens of the step."""


@dataclass(slots=True)
class _Delta:
    down: nn.Module
    up: nn.Module
    pair: Pair | None = None
    """The matrices of both, unpacked; None if they are packed for a CPU."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.up(self.down(inputs))
        return answer


class _Active:
    """The current step, shared by the hooks of one model."""

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()
        self.tokens = 0
        self.failures: list[Exception] | None = None
        """Errors of hooks in a trial pass; None outside of a trial, where an error fails the pass."""


class _Adapted:
    """The adapters of one linear layer, as its forward hook."""

    def __init__(self, path: str, module: nn.Module, active: _Active) -> None:
        self.path = path
        self.deltas: dict[int, _Delta] = {}
        self._active = active
        self._handle: RemovableHandle = module.register_forward_hook(self)

    @property
    def is_active(self) -> bool:
        """Return whether an adapter of the current step touches this layer."""
        return any(segment.adapter in self.deltas for segment in self._active.segments)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        """Add the adapters' contribution to the layer's output [..., T, out_features], in place."""
        if not self.is_active:
            return answer
        if self._active.failures is None:
            return self._add(inputs[0], answer)
        try:
            return self._add(inputs[0], answer)
        except Exception as error:
            self._active.failures.append(error)
            return answer

    def _add(self, hidden: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) != self._active.tokens:
            raise RuntimeError(f"{self.path} sees {len(rows)} rows of a step of {self._active.tokens} tokens")
        for adapter, tokens in self._active.segments:
            delta = self.deltas.get(adapter)
            if delta is None:
                continue
            flat = answer.view(len(rows), -1)  # a slice of a stack's output as well: no other layer reads it
            if tokens is None:
                flat.add_(delta(rows))
            else:
                flat.index_add_(0, tokens, delta(rows.index_select(0, tokens)))
        return answer

    def remove(self) -> None:
        self._handle.remove()


class AdapterSet:
    """The adapters of one model, by number. They are loaded and unloaded between steps."""

    def __init__(self, loaded: LoadedModel, max_loras: int, max_rank: int, growing: bool = True, group: Group | None = None) -> None:
        """`growing`: adapters can be loaded while the engine serves. `group`: the ranks that share `loaded`."""
        self._loaded, self._group = loaded, group
        self._most, self._max_rank, self._growing = max_loras, max_rank, growing
        self._layers: dict[str, _Adapted] = {}
        self._active = _Active()
        self.infos: dict[int, AdapterInfo] = {}
        self.slots: AdapterSlots | None = None
        """Slots that CUDA graphs read; None without graphs."""

    def __contains__(self, number: int) -> bool:
        return number in self.infos

    @torch.inference_mode()
    def load(self, number: int, name: str, uri: str, folder: Path) -> AdapterInfo:
        """Read and try the adapter in `folder`. On AdapterError the state is unchanged.

        All ranks of a sharded model load together and with the same outcome: each waits for the results of all.
        """
        files, cause = self._prepare(number, name, uri, folder)
        cause = self._agree(cause, files.digest if files is not None else "") or self._agree(self._try(number))
        if cause or files is None:
            self.unload(number)
            raise AdapterError(name, uri, cause)
        info = self.infos[number] = AdapterInfo(number, name, uri, files.digest, files.rank)
        logger.info("LoRA adapter %s: rank %d, %d layers, from %s", name, files.rank, len(files.pairs), uri)
        return info

    def unload(self, number: int) -> None:
        """Remove an adapter; an unknown number is ignored."""
        self.infos.pop(number, None)
        if self.slots is not None:
            self.slots.drop(number)
        for path, layer in list(self._layers.items()):
            if layer.deltas.pop(number, None) is not None and not layer.deltas:
                layer.remove()
                del self._layers[path]

    @torch.inference_mode()
    def allocate_slots(self) -> None:
        """Allocate the slots that CUDA graphs read, and move loaded adapters into them.

        If adapters can be loaded later, there are as many slots as allowed, of the highest rank and on all layers. Else there are as
        many as adapters, of their rank and layers; none without adapters. Raises MemoryError if they do not fit.
        """
        if self.slots is not None or not (self.infos or self._growing):
            return
        sizes = adaptable_layers(self._loaded.model)
        paths = sizes if self._growing else sizes.keys() & self._layers.keys()
        layers = {path: (site_of(self._loaded.model, path), sizes[path]) for path in paths}
        slots = self._most if self._growing else len(self.infos)
        rank = self._max_rank if self._growing else max(info.rank for info in self.infos.values())
        self.slots = AdapterSlots(layers, slots, rank, self._loaded.dtype, self._loaded.device)
        for number in self.infos:
            pairs = {path: layer.deltas[number].pair for path, layer in self._layers.items() if number in layer.deltas}
            if all(pairs.values()):  # moved one by one, so that the memory of each is free again
                self._hook(number, {path: pair for path, pair in pairs.items() if pair is not None})

    def pending_bytes(self) -> int:
        """Return the bytes that adapters loaded later may take, if no slots are reserved for them."""
        if self.slots is not None or not self._growing:
            return 0
        values = self._max_rank * sum(map(sum, adaptable_layers(self._loaded.model).values()))
        return (self._most - len(self.infos)) * values * self._loaded.dtype.itemsize

    @contextmanager
    def profile_adapter(self) -> Iterator[int]:
        """Yield the number of an adapter that makes a step take the most memory; 0 if there are no adapters and none can be loaded."""
        if not self._growing:
            yield max(self.infos, key=lambda number: self.infos[number].rank, default=0)
            return
        layers, rank = adaptable_layers(self._loaded.model), self._max_rank
        zeros = torch.zeros(rank * max(map(max, layers.values()), default=0), dtype=self._loaded.dtype, device=self._loaded.device)
        try:
            for path, (inputs, outputs) in layers.items():
                down, up = zeros[: rank * inputs].view(rank, inputs), zeros[: rank * outputs].view(outputs, rank)
                self._layer(path).deltas[PROFILE_ADAPTER] = _Delta(_plain(down), _plain(up))
            yield PROFILE_ADAPTER
        finally:
            self.unload(PROFILE_ADAPTER)

    def change(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
        """Load or unload an adapter. Implements `engine.loop.Adapters`."""
        if isinstance(message, LoadAdapter):
            try:
                return AdapterChanged(message.number, self.load(message.number, message.name, message.uri, Path(message.path)))
            except AdapterError as error:
                logger.warning("%s", error)
                return AdapterChanged(message.number, error=error.cause)
        if isinstance(message, UnloadAdapter):
            self.unload(message.number)
        return AdapterChanged(message.number)

    @contextmanager
    def activate(self, numbers: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Apply adapters in the forward pass inside this context: row i has `counts[i]` tokens and adapter `numbers[i]`, 0 for none."""
        self._active.segments, self._active.tokens = _segments(numbers, counts, self._loaded.device), sum(counts)
        try:
            yield
        finally:
            self._active.segments = ()

    def _agree(self, cause: str, digest: str = "") -> str:
        """Return why the ranks cannot continue; empty if all can."""
        return cause if self._group is None else self._group.objection(cause, digest)

    def _prepare(self, number: int, name: str, uri: str, folder: Path) -> tuple[AdapterFiles | None, str]:
        """Read the files of `folder` and install hooks for them; return the files, or the reason for a failure."""
        try:
            files = read_adapter(name, uri, folder, self._max_rank)
            if (count := len(self.infos)) >= self._most:
                raise AdapterError(
                    name,
                    uri,
                    f"{count} adapters are loaded, and at most {self._most} may be: unload one (an adapter that is being replaced counts "
                    "until its requests end), or raise --max-loras",
                )
            definition = getattr(self._loaded.model, "definition", None)
            pairs = files.pairs if definition is None else {definition.rename(path): pair for path, pair in files.pairs.items()}
            self._install(name, uri, number, {path: self._part(name, uri, path, pair) for path, pair in pairs.items()})
        except AdapterError as error:
            return None, error.cause
        except Exception as error:  # an unexpected error in a user's files must not stop the engine
            logger.exception("LoRA adapter %s could not be read", name)
            return None, AdapterError(name, uri, f"{type(error).__name__}: {error}").cause
        return files, ""

    def _part(self, name: str, uri: str, path: str, pair: Pair) -> Pair:
        """Return this rank's part of one layer's matrices. Raises AdapterError if the model has no such layer."""
        model, shards = self._loaded.model, self._loaded.shards
        try:
            why = unsupported_reason(model, path)
        except AttributeError:
            raise AdapterError(name, uri, f"the model has no {path}: is it an adapter of another model?") from None
        if why:
            raise AdapterError(name, uri, why)
        divided = None if shards is None else shards.divided.get(path)
        sizes, wanted = sizes_of(model.get_submodule(path)), (pair.down.shape[1], pair.up.shape[0])
        sizes = sizes if divided is None else divided.sizes
        assert sizes is not None, "it is not refused"
        if sizes != wanted:
            raise AdapterError(name, uri, f"{path} maps {sizes[0]} to {sizes[1]} values, and the adapter's part {wanted[0]} to {wanted[1]}")
        down, up = pair if divided is None else part_of(pair, divided.cut)
        order = orders_of(model, path)
        return Pair(down, up if order is None else up[order])

    def _install(self, name: str, uri: str, number: int, read: dict[str, Pair]) -> None:
        """Convert the matrices in host memory: the device may have room for the slot only. Raises AdapterError."""
        dtype, pairs = self._loaded.dtype, dict[str, Pair]()
        for path, pair in read.items():
            pairs[path] = Pair(*(half.to(dtype).contiguous() for half in pair))
            if not all(half.isfinite().all() for half in pairs[path]):
                raise AdapterError(name, uri, f"the part of {path} has values too large for {str(dtype).removeprefix('torch.')}")
        self._hook(number, pairs)

    def _hook(self, number: int, pairs: dict[str, Pair]) -> None:
        """Let the layers' hooks compute with `pairs`, from a slot if possible, else from separate memory."""
        if placed := self.slots.put(number, pairs) if self.slots is not None else {}:
            pairs = placed
        else:
            pairs = {path: Pair(*(half.to(self._loaded.device) for half in pair)) for path, pair in pairs.items()}
        halves = [half for pair in pairs.values() for half in pair]
        packs = not placed and self._loaded.device.type == "cpu" and self._loaded.dtype in DTYPES
        make = maker_for(halves) if packs else None
        for path, (down, up) in pairs.items():
            delta = _Delta(make(down, None), make(up, None)) if make else _Delta(_plain(down), _plain(up), Pair(down, up))
            self._layer(path).deltas[number] = delta

    def _layer(self, path: str) -> _Adapted:
        if path not in self._layers:
            self._layers[path] = _Adapted(path, site_of(self._loaded.model, path), self._active)
        return self._layers[path]

    def _try(self, number: int) -> str:
        """Run a few tokens through the model; return why the adapter fails, or empty.

        Every layer must see each token, and the logits must be finite. If a hook fails, the pass continues without it, because other
        ranks wait for this one's part of each sum. Any other error in a pass of all ranks ends this rank, and so the model, as in any
        step.
        """
        failures = self._active.failures = []
        try:
            with self.activate((0, number), (1, TRIAL_TOKENS - 1)):
                finite = bool(trial_logits(self._loaded.model).isfinite().all())
        except Exception as error:
            if self._group is not None:
                raise
            failures.append(error)
        finally:
            self._active.failures = None
        if failures:
            return f"the model does not run with it: {failures[0]}"
        return "" if finite else "the model does not run with it: its logits are not finite"


def _segments(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> list[Segment]:
    present = sorted(set(numbers) - {0})
    if len(present) == 1 and 0 not in numbers:
        return [Segment(present[0], None)]
    of_tokens = torch.repeat_interleave(torch.tensor(numbers), torch.tensor(counts))
    return [Segment(number, to_device((of_tokens == number).nonzero()[:, 0], device)) for number in present]


def _plain(weight: torch.Tensor) -> nn.Module:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
