"""`--chat-template` of a worker reaches the router, which tokenizes with the worker's prompt format."""

import re
from pathlib import Path

import httpx
import pytest
from tests.system.processes import Fleet, Process, engine_worker, until

from fairlead.random_model.build import make_model

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[answer]"
MESSAGES = [{"role": "user", "content": "hello there"}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", vocab=1024, layers=1)


def test_worker_and_router_render_with_the_template_of_the_flag(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    fleet = Fleet(tmp_path, workers=0, routers=1)
    address, process = engine_worker(tmp_path, model, "pod-0", "--chat-template", str(template))
    fleet.add_process("pod-0", address, process)
    with fleet:
        ((router, router_process),) = fleet.routers.items()
        answers = [httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60).json() for url in (router, f"http://{address}")]
        text = httpx.post(f"http://{address}/detokenize", json={"model": "tiny", "tokens": answers[0]["prompt_token_ids"]}).json()["prompt"]
        assert text == "[user] hello there\n[answer]"
        assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
        found = until_logged(router_process, r"/v1/chat/completions 200 .* prompt_tokens=(\d+)")
        assert int(found) == answers[0]["usage"]["prompt_tokens"], "the router's own tokens"


def until_logged(process: Process, pattern: str) -> str:
    until(lambda: re.search(pattern, process.log) is not None, f"{process.name} logs {pattern}", 20)
    found = re.search(pattern, process.log)
    assert found is not None
    return found[1]
