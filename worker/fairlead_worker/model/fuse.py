"""Kernels of a GPU for the small operations of a model, chosen at load: norms and the sums before them, activations, experts, ropes.

Each kind is tried in the whole model on tokens of a text, by the rule of `model.acceptance`. A kind that fails is undone, with a warning
that gives the reason. Models of transformers' own code get the kernels of experts only.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from transformers import PreTrainedModel

from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.exact import widened
from fairlead_worker.model.fused import sums
from fairlead_worker.model.fused.changes import Changes, Unfused
from fairlead_worker.model.fused.experts import fuse_experts, is_experts
from fairlead_worker.model.fused.library import DTYPES, Library
from fairlead_worker.model.layers.mlp import KERNELS, GatedMlp
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.lowbit.linear import Fp8Linear
from fairlead_worker.model.trial import trial
from fairlead_worker.model.trial_text import TrialText
from fairlead_worker.sharding.group import Group, Summed

logger = logging.getLogger(__name__)

KINDS = ("norm", "sums", "activation", "experts", "rope")
Fuse = Callable[[Changes], None]
"""Changes a model. Raises Unfused, or what a compiler or a kernel loader raises."""


def fuse_layers(model: PreTrainedModel, library: Library, limit: int, text: TrialText, kinds: tuple[str, ...] = KINDS) -> tuple[str, ...]:
    """Fuse those of `kinds` that can be in `model`; return which were. limit: positions of the longest request. text: what is tried.

    `sums` needs `norm`, and `activation` needs stacked projections. The ranks of a sharded model call this together, and all of them
    fuse a kind or none does.
    """
    name, dtype = type(model).__name__, model.dtype
    fusions = _fusions(model, library, limit)
    if not fusions:
        return ()
    if dtype not in DTYPES:
        logger.warning("%s: no layers are fused: kernels are for 16 bits, and it is in %s", name, str(dtype).removeprefix("torch."))
        return ()
    group = sums.group_of(model)
    before = trial(model, limit, text)
    try:
        with widened(model):
            exact = trial(model, limit, text)
    except Exception as error:  # whatever a family's own code raises
        logger.warning("%s: no layers are fused: it does not run in float32: %s", name, _shown(error))
        return ()
    made: dict[str, int] = {}
    for kind in (kind for kind in KINDS if kind in kinds and kind in fusions):
        changes = Changes()

        def apply() -> None:
            with nullcontext() if group is None else group.rehearse():  # so that no rank waits for one that fails
                fusions[kind](changes)  # noqa: B023  # runs immediately
                if group is not None:
                    trial(model, limit, text)

        def compare() -> None:
            for numbers in zip(trial(model, limit, text), before, exact, strict=True):
                if refusal := find_refusal(*numbers):
                    raise Unfused(refusal)

        reason = "its norms are not fused" if kind == "sums" and "norm" not in made else _failure(apply, group) or _failure(compare, group)
        if reason:
            logger.warning("%s: %s stays unfused: %s", name, kind, reason)
            changes.undo()
        else:
            made[kind] = len(changes)
    logger.info("%s: fused %s", name, ", ".join(f"{kind} ({count} places)" for kind, count in made.items()) or "nothing")
    return tuple(made)


def _fusions(model: PreTrainedModel, library: Library, limit: int) -> dict[str, Fuse]:
    """Return how each kind that `model` has is fused."""
    found: dict[str, Fuse] = {}
    if isinstance(model, Decoder):
        if any(isinstance(module, RmsNorm) for module in model.modules()):
            found["norm"] = partial(_fuse_norms, model, library)
        if sums.group_of(model) is not None:
            found["sums"] = partial(_fuse_sums, model)
        if any(isinstance(module, GatedMlp) for module in model.modules()):
            found["activation"] = partial(_fuse_activations, model, library)
        if model.model.ropes:
            found["rope"] = partial(_fuse_ropes, model, library, limit)
    if any(map(is_experts, model.modules())):
        found["experts"] = partial(fuse_experts, model, library)
    return found


def _fuse_norms(model: Decoder, library: Library, changes: Changes) -> None:
    """Norms, with the sums before them. Norms that only layers in float8 read also round."""
    for norm in model.modules():
        if isinstance(norm, RmsNorm):
            changes.set(norm, "kernels", library)
    for layer in model.layers:
        names = layer.definition.norms
        readers = [layer.attention] if layer.attends and not layer.recurs else []
        pairs = [(names.before_attention, reader) for reader in readers] + [(names.before_mlp, layer.mlp_or_experts)] * layer.feeds
        for name, reader in pairs:
            narrow = [part for part in reader.modules() if isinstance(part, Fp8Linear)]
            if isinstance(norm := layer.norm_of(name), RmsNorm) and narrow and narrow[0].rounder.fuses:
                changes.set(norm, "rounder", narrow[0].rounder)


def _fuse_sums(model: Decoder, changes: Changes) -> None:
    group = sums.group_of(model)
    assert group is not None, "the model is sharded"
    if reason := sums.unsupported(group):
        raise Unfused(reason)
    made = sums.RankSum(sums.load_library(), group, model.definition.width, model.dtype)
    layers = model.layers
    following = [*(layer.norm_of(layer.definition.norms.before_attention) for layer in layers[1:]), model.model.last_norm]
    for layer, next_norm in zip(layers, following, strict=True):
        names = layer.definition.norms
        if layer.recurs or not (layer.attends and layer.feeds):
            continue
        for last, after, norm in (
            (getattr(layer.attention, "o_proj", None), names.after_attention, layer.norm_of(names.before_mlp)),
            (getattr(layer.mlp_or_experts, "down_proj", None), names.after_mlp, next_norm),
        ):
            if not isinstance(last, Summed) or last.bias is not None or isinstance(last.layer, Fp8Linear) or after:
                continue
            if isinstance(norm, RmsNorm) and norm.rounder is None and layer.definition.residual_scale == 1:
                changes.set(last, "deferred", True)
                changes.set(norm, "sums", made)
    if not changes:
        raise Unfused("no norm in 16 bits follows a sum over ranks")


def _fuse_activations(model: Decoder, library: Library, changes: Changes) -> None:
    for mlp in model.modules():
        if isinstance(mlp, GatedMlp) and mlp.whole is not None and mlp.activation in KERNELS:
            changes.set(mlp, "kernels", library)
    if not changes:
        raise Unfused("it has no MLP whose gate and up are one matrix, with an activation that the kernels have")


def _fuse_ropes(model: Decoder, library: Library, limit: int, changes: Changes) -> None:
    if other := {spec.key_dim for spec in model.specs} - set(HEAD_DIMS):
        raise Unfused(f"its heads are of {', '.join(map(str, sorted(other)))}, and the kernel is for {', '.join(map(str, HEAD_DIMS))}")
    if model.definition.interleaved:
        raise Unfused("it rotates neighbours, and the kernel halves of a head")
    for rope in model.model.ropes.values():
        changes.set(rope, "table", torch.cat(rope.tables(torch.arange(limit, device=model.device)), 1))
        changes.set(rope, "kernels", library)


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
