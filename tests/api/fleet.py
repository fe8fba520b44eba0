"""A worker on a tiny random model and a router in front of it as processes, and the machine resources that they hold."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from tests.worker.api.process import WorkerProcess, until

from fairlead.random_model.build import make_model

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\nCalls are <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if reasoning_effort is defined and reasoning_effort != 'none' %}{{- '<think>' }}{%- endif %}
{%- endif %}
"""
"""A template of the Hermes kind: tools, and reasoning where the request has an effort, so both are parsed from answers."""


class Pair:
    """A context in which both run and are ready. `folder` gets the model (unless `model` is given) and the logs."""

    def __init__(self, folder: Path, *flags: str, model: Path | None = None, router_flags: tuple[str, ...] = ()) -> None:
        self._folder, self._flags, self._model, self._router_flags = folder, flags, model, router_flags

    def __enter__(self) -> "Pair":
        model = self._model
        if model is None:
            model = make_model(self._folder / "tiny", "qwen3", vocab=1024, layers=1)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        self.worker = WorkerProcess(model, self._folder / "worker", *self._flags).wait_ready()
        self.router_log = self._folder / "router.log"
        command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", "0", "--policy", "LeastLoad"]
        command += ["--workers", f"static://127.0.0.1:{self.worker.port}", *self._router_flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRLEAD_")}
        with self.router_log.open("wb") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            self.router_port = int(until(self._listening, "the router listens"))
            self.urls = (self.worker.url, f"http://127.0.0.1:{self.router_port}")
            until(lambda: httpx.get(f"{self.urls[1]}/ready").status_code == 200, "the router is ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.router.kill()
        self.router.wait()
        self.worker.kill()

    @property
    def alive(self) -> bool:
        return self.router.poll() is None and self.worker.process.poll() is None

    def _listening(self) -> str | None:
        assert self.router.poll() is None, self.router_log.read_text()
        found = re.search(r"running on http://127\.0\.0\.1:(\d+)", self.router_log.read_text())
        return found and found[1]

    def held(self) -> dict[str, Any]:
        """Return what must come back: pages in use, requests, descriptors, threads, and the memory (MiB) of the three processes."""
        load = self.worker.load()
        pids = {"worker": self.worker.process.pid, "engine": self.worker.engine_pid, "router": self.router.pid}
        return {
            "pages": load["pages_total"] - load["pages_free"],
            "requests": load["running"] + load["waiting"],
            **{f"{name} descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
            **{f"{name} MiB": _resident(pid) for name, pid in pids.items()},
        }


def _resident(pid: int) -> int:
    return int(re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[1]) // 1024  # type: ignore[index]
