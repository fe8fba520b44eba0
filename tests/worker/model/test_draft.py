"""A draft model that does not fit is rejected at start, with the reason."""

import json
from pathlib import Path

import pytest
from tests.models import save_model

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.draft import load_draft
from fairlead_worker.model.loader import load_model


def make(folder: Path, vocabulary: object, added: tuple[tuple[int, str], ...] = (), **overrides: int) -> Path:
    save_model("llama", folder, **overrides)
    tokens = [{"id": number, "content": content} for number, content in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return folder


def test_one_with_the_same_tokens_is_taken(tmp_path: Path) -> None:
    target = load_model(str(make(tmp_path / "target", {"a": 0, "b": 1}, ((2, "<end>"), (3, "<tool>")))))
    draft = make(tmp_path / "draft", {"a": 0, "b": 1}, ((2, "<end>"),))
    assert load_draft(str(draft), target).max_model_len == target.max_model_len
    assert load_draft(str(make(tmp_path / "unigram", [["a", -1.0], ["b", -2.0]])), target)


def test_others_are_refused_with_the_reason(tmp_path: Path) -> None:
    target = load_model(str(make(tmp_path / "target", {"a": 0, "b": 1})))
    with pytest.raises(ModelLoadError, match=r"tokenizers differ \(token 1 is 'c' there and 'b' here\)"):
        load_draft(str(make(tmp_path / "other", {"a": 0, "c": 1})), target)
    with pytest.raises(ModelLoadError, match="no token is in both"):
        load_draft(str(make(tmp_path / "apart", {"a": 7})), target)
    with pytest.raises(ModelLoadError, match=r"supports at most 512 tokens, .* 4096; set --max-model-len 512"):
        load_draft(str(make(tmp_path / "short", {"a": 0, "b": 1}, max_position_embeddings=512)), target)
    save_model("llama", tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"none/tokenizer.json cannot be read"):
        load_draft(str(tmp_path / "none"), target)
