"""LoRA adapters of a loaded model: any number of them at work in one packed forward pass, each on its own tokens.

A hook on a linear layer adds `up @ (down @ x)` to what the layer answers, adapter by adapter over the tokens that it has in the step, so
that one pass serves requests of several adapters and of none (the idea is Punica's, Chen et al. 2023, and S-LoRA's, Sheng et al. 2023).
Where projections are stacked, the hook is on the slice that stands for one of them. A layer that no adapter touches has no hook.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fairlead_worker.messages import AdapterChanged, AdapterInfo, LoadAdapter, UnloadAdapter
from fairlead_worker.model.adapter_files import AdapterFiles, Pair, read_adapter
from fairlead_worker.model.errors import AdapterError
from fairlead_worker.model.fuse import Stack
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.packed import DTYPES, maker_for
from fairlead_worker.model.probe import trial_logits

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 5
"""Of `trial_logits`."""


class Segment(NamedTuple):
    """The tokens of one adapter in a step."""

    adapter: int
    tokens: torch.Tensor | None
    """[n] int64, on the model's device; None: all of the step's."""


@dataclass(slots=True)
class _Delta:
    down: nn.Module
    up: nn.Module

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.up(self.down(inputs))
        return answer


class _Active:
    """The step that runs now, as the hooks of one model see it."""

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()
        self.tokens = 0


class _Adapted:
    """One linear layer's adapters, as its forward hook."""

    def __init__(self, path: str, module: nn.Module, active: _Active) -> None:
        self.path = path
        self.deltas: dict[int, _Delta] = {}
        self._active = active
        self._handle: RemovableHandle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        """The layer's answer [..., T, out_features], with what the adapters of the step's tokens add to it."""
        if not self._active.segments:
            return answer
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        if len(rows) != self._active.tokens:
            raise RuntimeError(f"{self.path} sees {len(rows)} rows of a step of {self._active.tokens} tokens")
        for adapter, tokens in self._active.segments:
            delta = self.deltas.get(adapter)
            if delta is None:
                continue
            if tokens is None:
                answer = answer + delta(rows).view_as(answer)
            else:
                flat = answer.reshape(len(rows), -1)
                answer = flat.index_add(0, tokens, delta(rows.index_select(0, tokens))).view_as(answer)
        return answer

    def remove(self) -> None:
        self._handle.remove()


class AdapterSet:
    """The adapters of one model, by number. Loading and unloading happen between steps."""

    def __init__(self, loaded: LoadedModel, max_loras: int, max_rank: int) -> None:
        self._loaded = loaded
        self._most, self._max_rank = max_loras, max_rank
        self._layers: dict[str, _Adapted] = {}
        self._active = _Active()
        self.infos: dict[int, AdapterInfo] = {}

    def __contains__(self, number: int) -> bool:
        return number in self.infos

    @torch.inference_mode()
    def load(self, number: int, name: str, uri: str, folder: Path) -> AdapterInfo:
        """Read and try the adapter in `folder`. Raises AdapterError; then everything is as it was."""
        if len(self.infos) >= self._most:
            raise AdapterError(name, uri, f"{len(self.infos)} adapters are loaded, and at most {self._most} may be: raise --max-loras")
        files = read_adapter(name, uri, folder, self._max_rank)
        modules = {path: self._module(name, uri, path, pair) for path, pair in files.pairs.items()}
        try:
            self._install(number, files, modules)
            self._try(number)
        except Exception as error:
            self.unload(number)
            cause = error.cause if isinstance(error, AdapterError) else f"the model does not run with it: {error}"
            raise AdapterError(name, uri, cause) from error
        info = self.infos[number] = AdapterInfo(number, name, uri, files.digest, files.rank)
        logger.info("LoRA adapter %s: rank %d, %d layers, from %s", name, files.rank, len(files.pairs), uri)
        return info

    def unload(self, number: int) -> None:
        """Forget an adapter; an unknown number is nothing to forget."""
        self.infos.pop(number, None)
        for path, layer in list(self._layers.items()):
            if layer.deltas.pop(number, None) is not None and not layer.deltas:
                layer.remove()
                del self._layers[path]

    def change(self, message: LoadAdapter | UnloadAdapter) -> AdapterChanged:
        """Implements `engine.loop.Adapters`."""
        if isinstance(message, UnloadAdapter):
            self.unload(message.number)
            return AdapterChanged(message.number)
        try:
            return AdapterChanged(message.number, self.load(message.number, message.name, message.uri, Path(message.path)))
        except AdapterError as error:
            logger.warning("%s", error)
            return AdapterChanged(message.number, error=error.cause)
        except Exception as error:  # what nobody foresaw of a stranger's files is no reason to end either
            logger.exception("LoRA adapter %s could not be loaded", message.name)
            return AdapterChanged(message.number, error=f"{type(error).__name__}: {error}")

    @contextmanager
    def over(self, numbers: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """For the forward pass inside: rows of `counts` tokens each are those of the adapters `numbers`, 0 being none."""
        self._active.segments, self._active.tokens = _segments(numbers, counts, self._loaded.device), sum(counts)
        try:
            yield
        finally:
            self._active.segments = ()

    def _module(self, name: str, uri: str, path: str, pair: Pair) -> nn.Module:
        try:
            module: nn.Module = self._loaded.model.get_submodule(path)
        except AttributeError:
            raise AdapterError(name, uri, f"the model has no {path}: is it an adapter of another model?") from None
        sizes = _sizes(module)
        if sizes is None or isinstance(module, Stack):
            raise AdapterError(name, uri, f"{path} is no linear layer of the model (but {type(module).__name__})")
        if ".experts." in path:  # it sees some of a step's tokens, and which ones is known to its parent alone
            raise AdapterError(name, uri, f"{path} is of one expert: adapters of experts are not served")
        if module is self._loaded.model.get_output_embeddings():
            raise AdapterError(name, uri, f"{path} is the model's head: adapters of lm_head are not served")
        wanted = pair.down.shape[1], pair.up.shape[0]
        if sizes != wanted:
            raise AdapterError(
                name, uri, f"{path} is of {sizes[0]} to {sizes[1]} values, and the adapter's part of {wanted[0]} to {wanted[1]}"
            )
        return module

    def _install(self, number: int, files: AdapterFiles, modules: dict[str, nn.Module]) -> None:
        dtype, device = self._loaded.dtype, self._loaded.device
        halves = {path: [half.to(device, dtype).contiguous() for half in (pair.down, pair.up)] for path, pair in files.pairs.items()}
        packs = device.type == "cpu" and dtype in DTYPES
        make = (maker_for([weight for pair in halves.values() for weight in pair]) if packs else None) or _plain
        for path, pair in halves.items():
            if path not in self._layers:
                self._layers[path] = _Adapted(path, modules[path], self._active)
            self._layers[path].deltas[number] = _Delta(*(make(half, None) for half in pair))

    def _try(self, number: int) -> None:
        """A few tokens through the model: every layer must see each of them, and the logits must be numbers."""
        with self.over((0, number), (1, TRIAL_TOKENS - 1)):
            logits = trial_logits(self._loaded.model)
        if not logits.isfinite().all():
            raise RuntimeError("its logits are no finite numbers")


def _segments(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> list[Segment]:
    present = sorted(set(numbers) - {0})
    if len(present) == 1 and 0 not in numbers:
        return [Segment(present[0], None)]
    of_tokens = torch.repeat_interleave(torch.tensor(numbers), torch.tensor(counts))
    return [Segment(number, (of_tokens == number).nonzero()[:, 0].to(device)) for number in present]


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of whatever does as a linear layer here."""
    inputs: Any = getattr(module, "in_features", getattr(module, "nx", None))
    outputs: Any = getattr(module, "out_features", getattr(module, "nf", None))
    return (int(inputs), int(outputs)) if inputs and outputs else None


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
