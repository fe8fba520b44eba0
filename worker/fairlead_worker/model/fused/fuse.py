"""Fusion of small layer operations on a GPU, in place: operations are recognised by structure and compared with the original model.

Each kind is tried part by part on random inputs, then in the whole model on tokens of a text, by the rule of `model.acceptance`. A kind
that fails is undone, with a warning that gives the reason.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext

from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fused.experts import expert_patches, has_experts
from fairlead_worker.model.fused.gated import gated_patches
from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.fused.norms import norm_patches, residual_patches
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.fused.rope import rope_patches
from fairlead_worker.model.fused.sums import group_of, is_sharded, sum_patches
from fairlead_worker.model.fused.trial import trial
from fairlead_worker.model.trial_text import TrialText
from fairlead_worker.sharding.group import Group

logger = logging.getLogger(__name__)

KINDS = ("norm", "residual", "sums", "activation", "experts", "rope")


def fuse_layers(
    model: PreTrainedModel,
    library: Library,
    layers: tuple[LayerSpec, ...],
    limit: int,
    text: TrialText,
    kinds: tuple[str, ...] = KINDS,
) -> tuple[str, ...]:
    """Fuse those of `kinds` that can be in `model`; return which were. limit: positions of the longest request. text: what is tried.

    `residual` needs `norm`, `sums` needs `residual`, and `activation` needs stacked projections (`fuse_projections`). The ranks of a
    sharded model call this together, and all of them fuse a kind or none does.
    """
    name, dtype = type(model).__name__, model.dtype
    if dtype not in DTYPES:
        logger.warning("%s: no layers are fused: kernels are for 16 bits, and it is in %s", name, str(dtype).removeprefix("torch."))
        return ()
    finders: dict[str, Callable[[], list[Patch]]] = {
        "norm": lambda: norm_patches(model, library),
        "residual": lambda: residual_patches(model),
        "sums": lambda: sum_patches(model),
        "activation": lambda: gated_patches(model, library),
        "experts": lambda: expert_patches(model, library),
        "rope": lambda: rope_patches(model, library, layers, limit),
    }
    applies = {"experts": has_experts, "sums": is_sharded}
    group = group_of(model)
    before = trial(model, limit, text)
    try:
        with widened(model):
            exact = trial(model, limit, text)
    except Exception as error:  # whatever a family's own code raises
        logger.warning("%s: no layers are fused: it does not run in float32: %s", name, _shown(error))
        return ()
    made: dict[str, int] = {}
    for kind in (kind for kind in KINDS if kind in kinds and (kind not in applies or applies[kind](model))):
        patches: list[Patch] = []

        def apply() -> None:
            with nullcontext() if group is None else group.rehearse():  # so that no rank waits for one that fails
                for patch in finders[kind]():  # noqa: B023  # runs immediately
                    patch.apply()
                    patches.append(patch)  # noqa: B023
                if group is not None:
                    trial(model, limit, text)

        def compare() -> None:
            for numbers in zip(trial(model, limit, text), before, exact, strict=True):
                if refusal := find_refusal(*numbers):
                    raise Unfused(refusal)

        if reason := _failure(apply, group) or _failure(compare, group):
            logger.warning("%s: %s stays unfused: %s", name, kind, reason)
            for patch in reversed(patches):
                patch.undo()
        else:
            made[kind] = len(patches)
    logger.info("%s: fused %s", name, ", ".join(f"{kind} ({count} modules)" for kind, count in made.items()) or "nothing")
    return tuple(made)


def _failure(work: Callable[[], None], group: Group | None) -> str:
    """Return why `work` fails, on this rank or on another; empty: it does not."""
    failure = ""
    try:
        work()
    except Exception as error:  # besides Unfused: whatever a family's code, a compiler or a kernel loader raises
        failure = str(error) if isinstance(error, Unfused) else _shown(error)
    return failure if group is None else group.agree(failure)


def _shown(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else 'no reason given'}"
