"""top_k and top_p by FlashInfer's kernels, which sort no vocabulary and never make the host wait.

Its functions that also draw are not used: their noise depends on a row's place in the batch.
"""

import importlib
import logging
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from fairlead_worker.kernels import flashinfer_library

SMALLER_INDEX = 1
"""`flashinfer.TopKTieBreak.SMALL`: of equal values, those with the smaller indices stay, as in a stable sort."""
TRIAL_WIDTH, TRIAL_VOCABULARY = 64, 4096
"""FlashInfer has another kernel for top_p below 2,048 tokens."""

logger = logging.getLogger(__name__)


class FilterLibrary(Protocol):
    """The module `flashinfer`. Checked against flashinfer-python 0.7.2.post1."""

    def top_k(self, input: torch.Tensor, k: int, sorted: bool, deterministic: bool, tie_break: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k largest values of each row of input [rows, n], and their indices int64."""
        ...

    def top_p_renorm_probs(self, probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool) -> torch.Tensor:
        """Return probs [rows, n] float32, scaled so that each row sums to 1, with 0 below the row's threshold.

        The threshold is the largest probability at which all that are not smaller sum to top_p [rows] float32.
        """
        ...


class DeviceFilters:
    """The kernels, in the modes whose result depends on a row alone."""

    def __init__(self, library: FilterLibrary) -> None:
        self._library = library

    def likeliest(self, logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `width` largest of each row in descending order, and their tokens, as `torch.topk`."""
        return self._library.top_k(logits, width, sorted=True, deterministic=True, tie_break=SMALLER_INDEX)

    def keep_top_p(self, probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary] float32: 0 for each token that is less likely than the last one that top_p [rows] needs."""
        return self._library.top_p_renorm_probs(probabilities, top_p.float(), is_deterministic=True)


def make_device_filters(device: torch.device) -> DeviceFilters | None:
    """Build the kernels and compare them with torch on a few rows.

    None on a CPU, and, with the reason in the log, if a kernel is missing or chooses other tokens.
    """
    if device.type != "cuda":
        return None
    library = cast(FilterLibrary | None, flashinfer_library.library())
    if library is None:
        return None
    filters = DeviceFilters(library)
    try:
        missing = uncompiled_modules()
        reason = f"{', '.join(missing)} not compiled, see `python -m fairlead_worker.kernels.prebuild`" if missing else ""
        reason = reason or _difference(filters, device)
    except Exception as error:  # whatever a compiler or a loader raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if reason:
        logger.warning("top_k and top_p use torch instead of FlashInfer's kernels, which is slower: %s", reason)
        return None
    return filters


def uncompiled_modules() -> list[str]:
    """Return the modules of the kernels that FlashInfer would have to compile first. That takes minutes, too long for a start."""
    if find_spec("flashinfer") is None:  # another library stands for it
        return []
    topk, sampling = (importlib.import_module(f"flashinfer.jit.{name}") for name in ("topk", "sampling"))
    return [spec.name for spec in (topk.gen_topk_module(), sampling.gen_sampling_module()) if not spec.is_compiled]


def _difference(filters: DeviceFilters, device: torch.device) -> str:
    """Return what the kernels choose differently from torch, in rows with many equal logits; empty if nothing."""
    places = torch.arange(TRIAL_VOCABULARY, device=device)
    logits = torch.stack([-(places * step % 97).float() / 8 for step in (1, 31, 57)])
    values, tokens = torch.sort(logits, dim=1, descending=True, stable=True)
    found = filters.likeliest(logits, TRIAL_WIDTH)
    if not (torch.equal(found[0], values[:, :TRIAL_WIDTH]) and torch.equal(found[1], tokens[:, :TRIAL_WIDTH])):
        return "top_k chooses other tokens than a stable sort"
    probabilities = logits.softmax(1)
    top_p = torch.tensor([0.3, 0.7, 0.99], device=device)
    ordered = probabilities.gather(1, tokens)
    last = (ordered.double().cumsum(1) < top_p[:, None]).sum(1, keepdim=True)
    kept = filters.keep_top_p(probabilities, top_p) > 0
    if not torch.equal(kept, probabilities >= ordered.gather(1, last)):
        return "top_p keeps other tokens than a sort"
    return ""
