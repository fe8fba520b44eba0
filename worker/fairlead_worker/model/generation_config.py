"""Sampling defaults of a model's authors: `generation_config.json` as it is, without transformers' own defaults."""

import json
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_BOUNDS = {"temperature": (0, 2), "top_p": (1e-9, 1), "top_k": (0, 2**31), "min_p": (0, 1), "repetition_penalty": (0.01, 100)}
"""The fields that are used, as in vLLM, with the API's own bounds."""


def find_defaults(generation_config: str, model: Path) -> dict[str, float]:
    """Return the defaults for a value of `--generation-config`: auto, none or a folder, as in vLLM."""
    if generation_config == "none":
        return {}
    return sampling_defaults(model if generation_config == "auto" else Path(generation_config))


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the recommended values that are present and valid. An unreadable file gives none."""
    try:
        raw = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    defaults: dict[str, float] = {}
    for name, (least, most) in _BOUNDS.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            logger.warning("generation_config.json: %s %r is not between %s and %s; it is not used", name, value, least, most)
            continue
        defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults
