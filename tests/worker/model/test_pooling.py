"""Pooling settings from a model's own files, and the rejection of unsupported ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fairlead_worker.model.pooling import read_pooling

MODULES = [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "sentence_transformers.models.Pooling", "path": "P"}]
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def config(**settings: Any) -> Any:
    return AutoConfig.for_model("qwen3", hidden_size=64, **settings)


def write(folder: Path, pooling: dict[str, Any] | None, modules: list[dict[str, str]] | None = None, place: str = "1_Pooling") -> None:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(pooling))


def test_without_a_word_the_last_token(tmp_path: Path) -> None:
    pooling = read_pooling(tmp_path, config())
    assert (pooling.kind, pooling.size, pooling.any_dimensions, pooling.dimensions) == ("last", 64, False, ())


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_as_sentence_transformers_files_say(said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    write(tmp_path, said, MODULES, "P")
    assert read_pooling(tmp_path, config()).kind == kind
    assert read_pooling(tmp_path, config(), "last").kind == "last", "the flag stands above them"


@pytest.mark.parametrize(
    ("said", "modules", "says"),
    [
        ({"pooling_mode_cls_token": True}, MODULES, "pools by cls_token"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, MODULES, "mean_tokens and max_tokens"),
        ({"pooling_mode_mean_tokens": True}, [*MODULES, DENSE], "Dense layer"),
        (None, MODULES, "P/config.json, which modules.json names, is not among the model's files"),
    ],
)
def test_what_is_not_done_is_not_done_otherwise(said: Any, modules: Any, says: str, tmp_path: Path) -> None:
    write(tmp_path, said, modules, "P")
    refused = read_pooling(tmp_path, config())
    assert refused.kind is None and says in refused.refused and "--pooling" in refused.refused


def test_lengths_are_those_that_the_config_declares_or_the_operator(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, config(is_matryoshka=True)).any_dimensions
    declared = read_pooling(tmp_path, config(is_matryoshka=True, matryoshka_dimensions=[32, 16]))
    assert declared.dimensions == (16, 32) and not declared.any_dimensions
    assert read_pooling(tmp_path, config(), matryoshka=True).any_dimensions
    assert read_pooling(tmp_path, config(), "none").refused == "embeddings are off here (--pooling none)"
