"""A local port that `kubectl port-forward` connects to a pod, with the user's own credentials."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from fairlead.errors import UserError
from fairlead.kube.live import NO_ROUTER, is_ready
from fairlead.local.containers import LOOPBACK
from fairlead.local.process import Guard
from fairlead_operator import names
from fairlead_operator.objects import component_of

START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 5.0
_READY: Final = re.compile(rf"Forwarding from {re.escape(LOOPBACK)}:(\d+)")


def choose_router(pods: Iterable[Mapping[str, Any]], service: str) -> str:
    """Return the name of the first ready router. Raises UserError without one."""
    routers = sorted(str(pod["metadata"]["name"]) for pod in pods if component_of(pod) == names.ROUTER and is_ready(pod))
    if not routers:
        raise UserError(f"{service}: {NO_ROUTER}. `fairlead explain {service}` says why")
    return routers[0]


class PortForward:
    """A running `kubectl port-forward`, as an async context manager. kubectl chooses a free local port; only this machine reaches it."""

    def __init__(self, pod: str, port: int, *, namespace: str, context: str = "", kubeconfig: str = "") -> None:
        place = [*(("--context", context) if context else ()), *(("--kubeconfig", kubeconfig) if kubeconfig else ())]
        self._words = [*place, "--namespace", namespace, "port-forward", "--address", LOOPBACK, f"pod/{pod}", f":{port}"]
        self._guard = Guard()
        self._child: asyncio.subprocess.Process | None = None
        self._last = ""
        self.url = ""

    async def __aenter__(self) -> "PortForward":
        """Start, and wait until the local port is open. Raises UserError with kubectl's reason."""
        program = shutil.which("kubectl")
        if program is None:
            raise UserError("kubectl, which forwards the port, is not on the PATH: install it, or forward the port yourself and give --url")
        self._guard.__enter__()
        try:
            self._child = await asyncio.create_subprocess_exec(
                program,
                *self._words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only
                env=os.environ,
            )
            self._guard.register(self._child.pid)
            async with asyncio.timeout(START_SECONDS):
                while not (found := _READY.search(await self._read_line())):
                    pass
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise UserError(f"kubectl port-forward did not start within {START_SECONDS:g} s: {self._last or 'no output'}") from None
            raise
        self.url = f"http://{LOOPBACK}:{found[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._child is not None:
            if self._child.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGTERM)
            with suppress(TimeoutError):  # the guard kills it then
                async with asyncio.timeout(STOP_SECONDS):
                    await self._child.wait()
                    self._guard.unregister(self._child.pid)
        self._guard.__exit__(kind, error, trace)

    async def wait(self) -> None:
        """Return never: raise UserError with kubectl's reason when the forwarding ends, as when the pod does."""
        while True:
            await self._read_line()

    async def _read_line(self) -> str:
        assert self._child is not None and self._child.stdout is not None, "enter the context first"
        line = (await self._child.stdout.readline()).decode(errors="replace")
        if not line:
            raise UserError(f"kubectl port-forward ended: {self._last or f'exit status {await self._child.wait()}'}")
        self._last = line.strip() or self._last
        return line
