"""A worker refuses a model whose prompts it cannot build, before it loads the weights."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import _load_prompt_format
from fairlead_worker.errors import ModelLoadError


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "chat template does not end.*--chat-template"),
        ("{% for %}", "chat template does not compile"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(tmp_path: Path, template: str, says: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=says):
        _load_prompt_format(WorkerConfig(model=str(tmp_path)), tmp_path, "digest", 64)
