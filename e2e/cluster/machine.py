"""Network, mount and pid namespaces that contain a whole cluster.

One init process owns them. Killing it ends every process inside, also containers and their shims. The kernel then removes mounts, links,
addresses and firewall rules, however the cluster ended. Only control groups and files remain, and `stop` removes those.
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
# The kubelet would set these for the whole machine. It changes no value that is right: a file with the right value is mounted over each.
_TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
# Overlays receive what components write to fixed paths (shim sockets, CNI results, pod log links, network namespaces).
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
    """The namespaces cannot be created or removed. The message contains the tool's output."""


class Machine:
    """All state is in the folder `run`. Any process may create an object for a machine, whether it runs or not."""

    def __init__(self, run: Path, cgroup: str) -> None:
        self.run = run
        self.cgroup = cgroup
        self.logs = run / "logs"
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self, pause: Path, address: str, services: str) -> None:
        """Create the namespaces, with `address` on loopback and a route for `services`. `pause` becomes the first process inside."""
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
                raise MachineFailed(f"cannot create the cluster's namespaces:\n{self.tail('machine')}")
            time.sleep(0.02)
        pid = int(children.read_text().split()[0])
        (self.run / "init").write_text(f"{pid} {_start_time(pid)}")

    @property
    def pid(self) -> int | None:
        """The id of the init process outside the namespaces; None: it does not run."""
        try:
            pid, started = (self.run / "init").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _start_time(int(pid)) == started else None

    def inside(self, *flags: str) -> list[str]:
        """Return the prefix of a command that runs in the network namespace, and with `--mount` and `--pid` in all namespaces."""
        pid = self.pid
        if pid is None:
            raise MachineFailed("the cluster does not run: start it with `python -m e2e.cluster up`")
        return ["nsenter", f"--target={pid}", "--net", *flags, "--"]

    @contextmanager
    def network(self) -> Iterator[None]:
        """Move the calling thread, and the threads and processes that it starts meanwhile, into the cluster's network."""
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
        """Start a long-running process inside. Its output goes to logs/NAME.log, and its exit code is recorded."""
        (self.run / "notes" / f"{name}.exit").unlink(missing_ok=True)
        arguments = [str(self.logs / f"{name}.log"), str(self.run / "notes" / name), *command]
        subprocess.run(
            [*self.inside("--mount", "--pid"), "sh", "-c", _SPAWN, "sh", *arguments],
            env=dict(environment),
            check=True,
            start_new_session=True,
        )

    def kill(self, name: str) -> None:
        """Kill one process inside, and wait until it has ended."""
        pid = (self.run / "notes" / f"{name}.pid").read_text().strip()
        subprocess.run([*self.inside("--mount", "--pid"), "sh", "-c", f"kill -9 {pid}"], check=False)
        while self.exit_code(name) is None:
            time.sleep(0.02)

    def exit_code(self, name: str) -> int | None:
        """Return the exit code of a spawned process; None while it runs."""
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
        """Return the `unshare` processes of this machine. The init process ends with its `unshare` process."""
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
        """End every process inside, and remove the files and control groups. Does nothing if there are none."""
        pid, launchers = self.pid, self._launchers()
        namespaces = {_namespace(f"{launcher}/ns/pid_for_children") for launcher in launchers}
        if pid is not None:
            namespaces.add(_namespace(f"{pid}/ns/pid"))
            os.kill(pid, signal.SIGKILL)
        for launcher in launchers:  # also those of a start that was killed before it recorded its init process
            with suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.wait()
            self._launcher = None
        _wait_until_empty(namespaces - {None, _namespace("self/ns/pid")})
        for controller in _cgroup_hierarchies():
            _remove_cgroups(controller / self.cgroup)
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        if any(Path(point).is_relative_to(self.run) for point in mounted):
            raise MachineFailed(f"something is mounted under {self.run}: unmount it before this can be removed")
        shutil.rmtree(self.run, ignore_errors=True)
        if self.run.exists():
            shutil.rmtree(self.run)


def _namespace(link: str) -> str | None:
    """Return the target of a link below /proc; None: its process has ended."""
    try:
        return str(Path("/proc", link).readlink())
    except OSError:
        return None


def _wait_until_empty(namespaces: set[str | None]) -> None:
    """Wait until no process is left in these pid namespaces.

    All processes are checked: an init process with several threads reads as dead while its last thread still ends the others.
    """
    deadline = time.monotonic() + 60
    while left := [path.name for path in Path("/proc").glob("[0-9]*") if _namespace(f"{path.name}/ns/pid") in namespaces]:
        if time.monotonic() > deadline:
            raise MachineFailed(f"processes {', '.join(left)} of the cluster did not end within 60 s of SIGKILL; see /proc/PID/stack")
        time.sleep(0.02)


def _start_time(pid: int) -> str:
    """Return the start of a process in clock ticks since boot, which distinguishes a pid that is used again; empty for a dead process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _cgroup_hierarchies() -> list[Path]:
    """Return the folders where control groups are mounted: one for each controller with version 1, one in total with version 2."""
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
            except OSError:  # a process in it has not ended yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
