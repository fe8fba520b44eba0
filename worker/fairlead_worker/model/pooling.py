"""Pooling settings: by the model's own sentence-transformers files, or by the worker's flags."""

import json
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedConfig

from fairlead_worker.ipc.messages import Pooling, PoolingKind

KINDS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}
"""sentence-transformers' names, as a flag or as the value of `pooling_mode`."""
HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Its modules whose work is done here: embeddings are always normalised."""


def read_pooling(folder: Path, config: PreTrainedConfig, wanted: str = "auto", matryoshka: bool = False) -> Pooling:
    """Return how the model in `folder` pools. `wanted`: last, mean or none; auto: by the model's files, else last.

    `matryoshka`: embeddings may be truncated, whatever the config says.
    """
    text = config.get_text_config(decoder=True)
    if wanted == "none":
        return Pooling(refused="embeddings are off here (--pooling none)")
    kind, refused = (wanted, "") if wanted in get_args(PoolingKind) else _own(folder)
    if refused:
        return Pooling(refused=refused)
    lengths = getattr(config, "matryoshka_dimensions", None) or ()
    return Pooling(
        kind="mean" if kind == "mean" else "last",
        size=int(text.hidden_size),
        any_dimensions=matryoshka or (bool(getattr(config, "is_matryoshka", False)) and not lengths),
        dimensions=() if matryoshka else tuple(sorted(int(length) for length in lengths)),
    )


def _own(folder: Path) -> tuple[PoolingKind, str]:
    """Return the pooling of sentence-transformers' files, and why it is unsupported (or empty).

    Without such files it is the last token, the only one that attends to all others.
    """
    modules = _json(folder / "modules.json")
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
    settings = _json(folder / place / "config.json")
    if not isinstance(settings, dict):
        return "last", f"{place}/config.json, which modules.json names, is not among the model's files: set --pooling" if named else ""
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    if len(modes) == 1 and modes[0] in KINDS:
        return KINDS[modes[0]], ""
    asked = " and ".join(mode.removeprefix("pooling_mode_") for mode in modes) or "none"
    return "last", f"the model pools by {asked} ({place}/config.json), which is not supported: set --pooling to last or mean"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
