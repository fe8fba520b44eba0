"""`transformers` with a server that ignores fields it does not know (`ignore_eos`); its own answers 422. Runs in the peer's environment."""

import sys

from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.transformers import app


def ignore_unknown(self: CompletionHandler, body: dict[str, object]) -> None:
    for field in body.keys() - self._valid_params_class.__mutable_keys__:
        del body[field]
    body.pop("model", None)  # it serves one, and refuses every name for it but its path


CompletionHandler._validate_request = ignore_unknown
sys.exit(app())
