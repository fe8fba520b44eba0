"""A machine inside the machine: network, mount and pid namespaces that hold a whole cluster.

One init process owns them. Killing it ends every process inside (containers and their shims too), and with the last process the kernel
takes back mounts, links, addresses and firewall rules: nothing can be left behind, however the cluster died. Only its control groups and
its files remain, and `stop` removes those.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .packages import SEARCH_PATH

_CLONE_NEWNET = 0x40000000
# kubelet would set these for the whole machine; with a file that already says what it wants mounted over each, it leaves them alone.
_TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
# Overlays catch what components write to fixed places (shim sockets, CNI results, pod log links, network namespaces).
_SETUP = """
set -eu
run=$1 pause=$2 address=$3 services=$4
mount --make-rshared /
mount -t proc proc /proc
for folder in /var/lib /var/log /run; do
    mkdir -p "$run/overlay$folder" "$run/overlay-work$folder"
    mount -t overlay -o "lowerdir=$folder,upperdir=$run/overlay$folder,workdir=$run/overlay-work$folder" overlay "$folder"
done
for file in $(cd "$run/sysctl" && find . -type f); do mount --bind "$run/sysctl/$file" "/proc/sys/$file"; done
ip link set lo up
ip address add "$address/32" dev lo
ip route add "$services" dev lo src "$address"
echo 1 > /proc/sys/net/ipv4/ip_forward
touch "$run/ready"
exec "$pause"
"""
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private")
_SPAWN = 'log=$1 note=$2; shift 2; { "$@" & echo $! > "$note.pid"; wait $!; echo $? > "$note.exit"; } >> "$log" 2>&1 < /dev/null &'


class MachineFailed(RuntimeError):
    """The namespaces could not be made or taken away; the message carries the tool's own words."""


class Machine:
    """All state lies under `run`; an object can be made at any time, in any process, for a machine that runs or not."""

    def __init__(self, run: Path, cgroup: str) -> None:
        self.run = run
        self.cgroup = cgroup
        self.logs = run / "logs"
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self, pause: Path, address: str, services: str) -> None:
        """Makes the namespaces, with `address` on loopback and a route for `services`; `pause` becomes the first process inside."""
        for folder in ("logs", "notes", "sysctl"):
            (self.run / folder).mkdir(parents=True, exist_ok=True)
        for name, value in _TUNABLES.items():
            path = self.run / "sysctl" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        for controller in _cgroup_hierarchies():
            (controller / self.cgroup).mkdir(exist_ok=True)
        with (self.logs / "machine.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", _SETUP, "sh", str(self.run), str(pause), address, services],
                env={**os.environ, "PATH": SEARCH_PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        children = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
        deadline = time.monotonic() + 20
        while not (self.run / "ready").exists():
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise MachineFailed(f"cannot make the cluster's namespaces:\n{self.tail('machine')}")
            time.sleep(0.02)
        pid = int(children.read_text().split()[0])
        (self.run / "init").write_text(f"{pid} {_start_time(pid)}")

    @property
    def pid(self) -> int | None:
        """The init process, as this machine numbers it; None when it does not run."""
        try:
            pid, started = (self.run / "init").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _start_time(int(pid)) == started else None

    def inside(self, *flags: str) -> list[str]:
        """Prefix of a command that shall run inside: its network, and with `--mount` and `--pid` all of it."""
        pid = self.pid
        if pid is None:
            raise MachineFailed("the cluster does not run: start it with `python -m e2e.cluster up`")
        return ["nsenter", f"--target={pid}", "--net", *flags, "--"]

    @contextmanager
    def network(self) -> Iterator[None]:
        """Moves the calling thread, and the threads and processes it starts meanwhile, into the cluster's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(f"/proc/{self.pid}/ns/net") as cluster:  # noqa: PTH123 (setns takes descriptors)
            for_home, for_cluster = home.fileno(), cluster.fileno()
            if libc.setns(for_cluster, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns into the cluster's network failed")
            try:
                yield
            finally:
                libc.setns(for_home, _CLONE_NEWNET)

    def spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Starts a long-running process inside; its output goes to logs/NAME.log, its end is noted."""
        (self.run / "notes" / f"{name}.exit").unlink(missing_ok=True)
        arguments = [str(self.logs / f"{name}.log"), str(self.run / "notes" / name), *command]
        subprocess.run(
            [*self.inside("--mount", "--pid"), "sh", "-c", _SPAWN, "sh", *arguments],
            env=dict(environment),
            check=True,
            start_new_session=True,
        )

    def kill(self, name: str) -> None:
        """Ends one process inside, at once, and waits until it is gone."""
        pid = (self.run / "notes" / f"{name}.pid").read_text().strip()
        subprocess.run([*self.inside("--mount", "--pid"), "sh", "-c", f"kill -9 {pid}"], check=False)
        while self.exit_code(name) is None:
            time.sleep(0.02)

    def exit_code(self, name: str) -> int | None:
        """How a spawned process ended; None while it runs."""
        try:
            return int((self.run / "notes" / f"{name}.exit").read_text() or "-1")
        except FileNotFoundError:
            return None

    def tail(self, name: str, lines: int = 20) -> str:
        try:
            text = (self.logs / f"{name}.log").read_text(errors="replace")
        except FileNotFoundError:
            return "(no output)"
        return "\n".join(line[:400] for line in text.splitlines()[-lines:]) or "(no output)"

    def _launchers(self) -> list[int]:
        """The `unshare` processes of this machine; when one dies, so does the init process below it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if arguments[0] == "unshare" and str(self.run) in arguments:
                found.append(int(process.name))
        return found

    def stop(self) -> None:
        """Ends everything inside and removes the files and control groups; does nothing when there is nothing."""
        pid, launchers = self.pid, self._launchers()
        namespaces = {_namespace(f"{launcher}/ns/pid_for_children") for launcher in launchers}
        if pid is not None:
            namespaces.add(_namespace(f"{pid}/ns/pid"))
            os.kill(pid, signal.SIGKILL)
        for launcher in launchers:  # also of a start that was killed before it could note its init process
            with suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.wait()
            self._launcher = None
        _wait_for_the_end(namespaces - {None, _namespace("self/ns/pid")})
        for controller in _cgroup_hierarchies():
            _remove_cgroups(controller / self.cgroup)
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        if any(Path(point).is_relative_to(self.run) for point in mounted):
            raise MachineFailed(f"something is mounted under {self.run}: unmount it before this can be removed")
        shutil.rmtree(self.run, ignore_errors=True)
        if self.run.exists():
            shutil.rmtree(self.run)


def _namespace(link: str) -> str | None:
    """What a link below /proc names; None when its process has gone."""
    try:
        return str(Path("/proc", link).readlink())
    except OSError:
        return None


def _wait_for_the_end(namespaces: set[str | None]) -> None:
    """Until no process is left in these pid namespaces.

    Asked of all processes: an init process with several threads reads as dead while the last of them still ends the others.
    """
    deadline = time.monotonic() + 60
    while left := [path.name for path in Path("/proc").glob("[0-9]*") if _namespace(f"{path.name}/ns/pid") in namespaces]:
        if time.monotonic() > deadline:
            raise MachineFailed(f"processes {', '.join(left)} of the cluster did not end within 60 s of SIGKILL; see /proc/PID/stack")
        time.sleep(0.02)


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot, so that a pid used again is not taken for ours; empty for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _cgroup_hierarchies() -> list[Path]:
    """Where control groups are mounted: one folder for each controller with version 1, one in all with version 2."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(point) for _, point, kind, *_ in mounts if kind in {"cgroup", "cgroup2"}]


def _remove_cgroups(top: Path) -> None:
    if not top.exists():
        return
    for folder, _, _ in os.walk(top, topdown=False):
        deadline = time.monotonic() + 10
        while True:
            try:
                Path(folder).rmdir()
                break
            except OSError:  # a process in it has not quite gone
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
