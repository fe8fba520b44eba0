"""`transformers` with a server that ignores fields it does not know, instead of answering 422. Runs in the peer's environment.

Answers do not end at EOS, as the client asks of every server (`ignore_eos`).
"""

import sys

from transformers import GenerationConfig
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.transformers import app


def ignore_unknown(self: CompletionHandler, body: dict[str, object]) -> None:
    for field in body.keys() - self._valid_params_class.__mutable_keys__:
        del body[field]
    body.pop("model", None)  # it serves one, and refuses every name for it but its path


def build_config(self: CompletionHandler, body: dict[str, object], *arguments: object, **named: object) -> GenerationConfig:
    config = build(self, body, *arguments, **named)
    config.eos_token_id = -1  # off
    return config


build = CompletionHandler._build_generation_config
CompletionHandler._validate_request = ignore_unknown
CompletionHandler._build_generation_config = build_config
sys.exit(app())
