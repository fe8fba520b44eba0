"""SmolLM2-135M-Instruct, as users have it: behind HTTP, and behind a scheduler in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models import one_thread
from tests.real_models import SMOLLM2, real_folder
from tests.worker.api.process import WorkerProcess
from transformers import AutoTokenizer, PreTrainedTokenizerFast

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_folder(SMOLLM2)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(smollm2)
    return found


@pytest.fixture(scope="session")
def encode(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """Returns the tokens of a question in the chat template, up to where the answer begins."""

    def encode(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    return encode


@pytest.fixture(scope="session")
def worker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags, variables = ("--served-model-name", "smollm2"), {"FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING": "true"}
    process = WorkerProcess(smollm2, tmp_path_factory.mktemp("real"), *flags, **variables)
    yield process.wait_ready()
    assert process.stop() == 0


class Chat:
    """Asks a worker or a router, greedily unless told otherwise."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def ask(self, *messages: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the whole answer. A string is a user's message."""
        response = self._process.post("/v1/chat/completions", **_body(messages, fields))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, *messages: str | dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        """Return the first choice of each chunk of the streamed answer."""
        with self._process.stream("/v1/chat/completions", **_body(messages, fields)) as (response, events):
            assert response.status_code == 200, response.read()
            chunks = [event for event in events if isinstance(event, dict)]
        return [chunk["choices"][0] for chunk in chunks if chunk["choices"]]


def _body(messages: tuple[str | dict[str, Any], ...], fields: dict[str, Any]) -> dict[str, Any]:
    said = [{"role": "user", "content": message} if isinstance(message, str) else message for message in messages]
    return {"messages": said, "temperature": 0, "max_tokens": 60} | fields


@pytest.fixture
def chat(worker: WorkerProcess) -> Chat:
    return Chat(worker)
