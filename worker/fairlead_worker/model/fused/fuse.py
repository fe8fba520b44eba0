"""Fusion of small layer operations on a GPU, in place: operations are recognised by structure and compared with the original model.

Each kind is verified part by part on random inputs (within `model.fuse.TOLERANCE`), then in the whole model (`trial.TOLERANCE`). A
kind that fails is undone, with a warning that gives the reason.
"""

import logging
from collections.abc import Callable

from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.fuse import tolerance_of
from fairlead_worker.model.fused.experts import expert_patches, has_experts
from fairlead_worker.model.fused.gated import gated_patches
from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.fused.norms import norm_patches, residual_patches
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.fused.rope import rope_patches
from fairlead_worker.model.fused.trial import LOW_BIT, TOLERANCE, difference, trial

logger = logging.getLogger(__name__)

KINDS = ("norm", "residual", "activation", "experts", "rope")


def fuse_layers(
    model: PreTrainedModel, library: Library, layers: tuple[LayerSpec, ...], limit: int, kinds: tuple[str, ...] = KINDS
) -> tuple[str, ...]:
    """Fuse those of `kinds` that can be in `model`; return which were. limit: positions of the longest request.

    `residual` needs `norm`, and `activation` needs stacked projections (`fuse_projections`).
    """
    name, dtype = type(model).__name__, model.dtype
    if dtype not in DTYPES:
        logger.warning("%s: no layers are fused: kernels are for 16 bits, and it is in %s", name, str(dtype).removeprefix("torch."))
        return ()
    finders: dict[str, Callable[[], list[Patch]]] = {
        "norm": lambda: norm_patches(model, library),
        "residual": lambda: residual_patches(model),
        "activation": lambda: gated_patches(model, library),
        "experts": lambda: expert_patches(model, library),
        "rope": lambda: rope_patches(model, library, layers, limit),
    }
    before = trial(model, limit)
    tolerance = TOLERANCE[dtype] if tolerance_of(model) is None else LOW_BIT
    made: dict[str, int] = {}
    for kind in (kind for kind in KINDS if kind in kinds and (kind != "experts" or has_experts(model))):
        patches: list[Patch] = []
        try:
            patches = finders[kind]()
            for number, patch in enumerate(patches):
                patch.apply()
                made[kind] = number + 1
            worst = difference(trial(model, limit), before)
            if not worst <= tolerance:
                raise Unfused(f"the model's numbers change by {worst:.1e} of their size, more than {tolerance:.0e}")
        except Exception as reason:  # besides Unfused: whatever a family's code, a compiler or a kernel loader raises
            logger.warning("%s: %s stays unfused: %s", name, kind, reason if isinstance(reason, Unfused) else _shown(reason))
            for patch in reversed(patches[: made.pop(kind, 0)]):
                patch.undo()
    logger.info("%s: fused %s", name, ", ".join(f"{kind} ({count} modules)" for kind, count in made.items()) or "nothing")
    return tuple(made)


def _shown(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else 'no reason given'}"
