"""Pooling settings: by the model's own sentence-transformers files, or by the worker's flags."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from fairlead_worker.ipc.messages import Pooling, PoolingKind

KINDS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "last": "last",
    "mean": "mean",
    "pooling_mode_cls_token": "cls",
    "cls": "cls",
}
"""sentence-transformers' names, as a flag or as the value of `pooling_mode`."""
HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Its modules whose work is done here: embeddings are always normalised."""


def read_pooling(
    folder: Path, config: PreTrainedConfig, wanted: str = "auto", matryoshka: bool = False, is_encoder: bool = False
) -> Pooling:
    """Return how the model in `folder` pools. `wanted`: last, mean, cls or none; auto: by the model's files.

    Without files: an encoder's mean, as sentence-transformers does; else the last token, the only one that attends to all others.
    Only an encoder's first token attends to others, so that cls is refused for a decoder.

    `matryoshka`: embeddings may be truncated, whatever the config says.
    """
    text = config.get_text_config(decoder=True)
    if wanted == "none":
        return Pooling(refused="embeddings are off here (--pooling none)")
    kind, refused = (KINDS[wanted], "") if wanted in KINDS else _own(folder, "mean" if is_encoder else "last")
    if kind == "cls" and not is_encoder:
        refused = "the model pools by cls_token, the first token, which in a decoder sees no other: set --pooling to last or mean"
    if refused:
        return Pooling(refused=refused)
    lengths = getattr(config, "matryoshka_dimensions", None) or ()
    return Pooling(
        kind=kind,
        size=int(text.hidden_size),
        any_dimensions=matryoshka or (bool(getattr(config, "is_matryoshka", False)) and not lengths),
        dimensions=() if matryoshka else tuple(sorted(int(length) for length in lengths)),
    )


def _own(folder: Path, default: PoolingKind) -> tuple[PoolingKind, str]:
    """Return the pooling of sentence-transformers' files, and why it is unsupported (or empty). Without such files it is `default`."""
    modules = read_json(folder / "modules.json")
    place, named = "1_Pooling", False
    for module in modules if isinstance(modules, list) else ():
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            place, named = str(module.get("path", place)), True
        elif name not in HARMLESS:
            return (
                "last",
                f"the model has a {name} layer after its pooling (modules.json), which is not supported: set --pooling",
            )
    settings = read_json(folder / place / "config.json")
    if not isinstance(settings, dict):
        return default, f"{place}/config.json, which modules.json names, is not among the model's files: set --pooling" if named else ""
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    if len(modes) == 1 and modes[0] in KINDS:
        return KINDS[modes[0]], ""
    asked = " and ".join(mode.removeprefix("pooling_mode_") for mode in modes) or "none"
    return "last", f"the model pools by {asked} ({place}/config.json), which is not supported: set --pooling to last or mean"


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; None if there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
