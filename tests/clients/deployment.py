"""One real worker on a tiny random model and the routers in front of it, shared by every client's suite."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import httpx
from tests.clients.endpoints import KEY, MODEL, POOR_KEY, Endpoints
from tests.servers.redis_server import RedisServer, free_port
from tests.worker.api.process import WorkerProcess, until

from fairlead.random_model.build import make_model

NAMESPACE = "clients/tiny"
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nCalls are {"name": <function-name>, "arguments": <args-json-object>} within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A template of the Hermes kind, as Qwen's: tools in the system message, calls as JSON between `<tool_call>` tags."""


@contextmanager
def deployed(folder: Path, template: str = TEMPLATE) -> Iterator[Endpoints]:
    """Start everything and wait until it is ready; stop everything on exit."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        index = ("--redis-url", redis.url, "--index-namespace", NAMESPACE)
        variables = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE, "FAIRLEAD_POD_NAME": "pod-0"}
        model = make_model(folder / MODEL, "qwen3", vocab=1024, layers=1)
        (model / "chat_template.jinja").write_text(template)
        worker = WorkerProcess(model, folder / "worker", "--served-model-name", MODEL, **variables)
        stack.callback(worker.kill)
        (folder / "keys.yaml").write_text(_keys())

        def router(*flags: str) -> str:
            port = free_port()
            command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), *flags]
            with (folder / f"router-{port}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return f"http://127.0.0.1:{port}"

        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))  # bound without listening: another test's worker could take a port that is merely free
        there, nowhere = (f"static://127.0.0.1:{port}" for port in (worker.port, unused.getsockname()[1]))
        endpoints = Endpoints(
            worker=worker.url,
            router=router("--workers", there, *index),
            guarded=router("--workers", there, *index, "--api-keys-file", str(folder / "keys.yaml")),
            forsaken=router("--workers", nowhere, "--hold-timeout", "0"),
        )
        worker.wait_ready()
        for url in (endpoints.router, endpoints.guarded):
            until(lambda url=url: _sees(url), f"the router {url} sees the worker")
        until(lambda: _answers(endpoints.forsaken), "the router without workers listens")
        yield endpoints


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _sees(url: str) -> bool:
    if not _answers(url):
        return False
    answer = httpx.get(f"{url}/fairlead/workers", headers={"authorization": f"Bearer {KEY}"})
    return any(worker["usable"] for worker in answer.json()["workers"])


def _keys() -> str:
    def keys(key: str) -> list[dict[str, str]]:
        return [{"sha256": sha256(key.encode()).hexdigest()}]

    tenants = {"rich": {"keys": keys(KEY)}, "poor": {"keys": keys(POOR_KEY), "tokensPerMinute": 1}}
    return json.dumps({"saltSecret": "a secret for salts of at least 32 characters", "tenants": tenants})
