"""A real Kubernetes on this machine: starts its components in separate namespaces, waits until they work, and removes everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from e2e import progress

from . import binaries, certificates, components, images, packages, store
from .machine import Machine
from .paths import cache_root, locked, run_root

_OVERLAID = ("/var/lib", "/var/log", "/run")  # hidden inside the cluster's mount namespace (machine.py)


class ComponentFailed(RuntimeError):
    """A component ended or did not become ready. The message names it and contains its last lines."""


class LocalKubernetes:
    """One cluster, known by its name. `up` and `down` may be called in any order and number, from any process."""

    def __init__(self, name: str = "default") -> None:
        if not name.isalnum() or len(name) > 16:
            raise ValueError(f"cluster name {name!r}: use 1 to 16 letters and digits")
        self.name = name
        self.run = run_root() / name
        self.images = cache_root() / "containerd" / name
        self.machine = Machine(self.run, cgroup=f"fairlead-{name}")
        self.kubeconfig = self.run / "certificates" / "admin.kubeconfig"

    @property
    def running(self) -> bool:
        return self.machine.pid is not None and (self.run / "up").exists()

    @property
    def kept(self) -> bool:
        """Whether it keeps running after a test run."""
        return self.running and (self.run / "keep").exists()

    def up(self, keep: bool = False) -> None:
        """Start the cluster if it does not run, and wait for its node and DNS. Raises ComponentFailed, which names the component."""
        packages.ensure()
        self._check_paths()
        layout = self.layout()
        with locked(self._lock):
            if self.running and keep:
                (self.run / "keep").touch()
            if self.running and not self._ended(list(components.commands(layout))) and self._kubectl("get", "--raw=/readyz") == "ok":
                return
            self._stop_machines()
            try:
                with progress.step(f"start Kubernetes (cluster {self.name})"):
                    self._start(layout)
            except BaseException:
                self._keep_logs()
                self._stop_machines()
                raise
            (self.run / "up").touch()
            if keep:
                (self.run / "keep").touch()
            shutil.rmtree(self._kept_logs, ignore_errors=True)

    def down(self, purge: bool = False) -> None:
        """Remove every process, mount, namespace, control group and file of the cluster. Imported images stay in the cache.

        `purge`: also remove these images, and the logs of a failed start.
        """
        with locked(self._lock):
            self._stop_machines()
            if purge:
                shutil.rmtree(self.images, ignore_errors=True)
                shutil.rmtree(self._kept_logs, ignore_errors=True)

    def stop_components(self, *names: str) -> None:
        """End components, such as `kube-apiserver`, with SIGKILL. Pods keep running."""
        for name in names:
            self.machine.kill(name)

    def start_components(self, *names: str) -> None:
        """Start components that were stopped, and wait until the API server answers. Those that need it start last."""
        below = [name for name in names if name in ("containerd", "etcd", "kube-apiserver")]
        self._spawn(self._commands(), *below)
        self._wait("kube-apiserver", lambda: self._kubectl("get", "--raw=/readyz") == "ok", *below)
        if "containerd" in names:
            self._wait("containerd", lambda: self._ctr("version") != "")
        self._spawn(self._commands(), *(name for name in names if name not in below))

    @contextmanager
    def without_components(self, *names: str) -> Iterator[None]:
        """Stop components in the block. Those that have ended are started again, also if the block fails or the stop is interrupted."""
        try:
            self.stop_components(*names)
            yield
        finally:
            self.start_components(*self._ended(list(names)))

    def second_machine(self) -> Machine:
        """Return the machine of a second node (second_node.py), whether it runs or not."""
        return Machine(self.run / "node2", cgroup=f"{self.machine.cgroup}-node2")

    def _stop_machines(self) -> None:
        self.second_machine().stop()
        self.machine.stop()

    def load_image(self, reference: str) -> None:
        """Import an image that `images.build` made into the node's containerd, with only those layers that it lacks."""
        have = self._ctr("images", "ls", "-q").split()
        if reference in have:
            return
        with progress.step(f"import image {reference}"):
            written = self._import_layers(reference)
        older = [name for name in have if name.startswith(reference.rpartition(":")[0] + ":")]
        if older:
            self._ctr("images", "rm", *older)
            self._remove_unnamed_images()
        store.share_layers(reference, self.images / "io.containerd.content.v1.content")
        progress.say(f"{reference}: {written / 1e6:.0f} MB of layers were new")

    def _import_layers(self, reference: str) -> int:
        """Return the bytes of layers that were written. Raises ImageFailed."""
        present = set(self._ctr("content", "ls", "-q").split())
        command = ["ctr", f"--address={self.run / 'containerd.sock'}", "--namespace=k8s.io", "images", "import", "-"]
        with (self.machine.logs / "import.log").open("w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self.environment)
            assert process.stdin is not None
            try:
                written = store.write_archive(reference, present, process.stdin)
                process.stdin.close()
            except BrokenPipeError:
                written = 0
            if process.wait() != 0:
                raise images.ImageFailed(f"containerd refused {reference}:\n{self.machine.tail('import')}")
        return written

    def _remove_unnamed_images(self) -> None:
        """Remove images without a name. The CRI plugin records every image a second time, by digest, which keeps all of its layers."""
        targets = {}
        for line in self._ctr("images", "ls").splitlines()[1:]:
            name, *columns = line.split()
            targets[name] = next(column for column in columns if column.startswith("sha256:"))
        named = {digest for name, digest in targets.items() if not name.startswith("sha256:")}
        unnamed = [name for name, digest in targets.items() if digest not in named]
        if unnamed:
            self._ctr("images", "rm", *unnamed)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment of clients: kubectl and helm on PATH, KUBECONFIG, and caches inside the run directory."""
        programs = [str(path.parent) for path in binaries.build().values()]
        return {
            **os.environ,
            "PATH": os.pathsep.join([*dict.fromkeys(programs), packages.SEARCH_PATH]),
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.run / "clients" / "kube"),
            **{f"HELM_{kind}_HOME": str(self.run / "clients" / f"helm-{kind.lower()}") for kind in ("CACHE", "CONFIG", "DATA")},
        }

    def layout(self) -> components.Layout:
        """Return the paths and programs of the first node and the control plane."""
        programs = binaries.build()
        cni = packages.cni_folder()
        assert cni is not None, "packages.ensure installs it"
        return components.Layout(self.run, self.images, programs, cni, self.machine.cgroup, images.pause(programs["pause"]))

    def _start(self, layout: components.Layout) -> None:
        self.run.mkdir(parents=True)
        self.images.mkdir(parents=True, exist_ok=True)
        certificates.write_all(layout.certificates, components.SERVER_NAMES, components.API_SERVER)
        components.write_configuration(layout)
        self.machine.start(layout.binaries["pause"], components.NODE_ADDRESS, components.SERVICE_RANGE)
        commands = components.commands(layout)
        (self.run / "commands.json").write_text(json.dumps(commands))
        spawn = partial(self._spawn, commands)
        spawn("containerd", "etcd", "kube-apiserver")
        self._wait("containerd", lambda: self._ctr("version") != "")
        if leftovers := self._ctr("containers", "ls", "-q").split():
            # They belong to an earlier cluster: the store is kept for its images. containerd reads its list only when it starts.
            self._ctr("containers", "rm", *leftovers)
            self.machine.kill("containerd")
            spawn("containerd")
            self._wait("containerd", lambda: self._ctr("version") != "")
        self.load_image(layout.pause_image)
        self._wait("kube-apiserver", lambda: self._kubectl("get", "--raw=/readyz") == "ok", "etcd")
        self._wait("kube-apiserver", lambda: self._kubectl("apply", "-f", str(self.run / "bootstrap.yaml")) != "")
        spawn("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns")
        ready = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self._wait("kubelet", lambda: self._kubectl("get", "node", components.NODE, ready) == "True", "kube-controller-manager")
        self._wait("kube-controller-manager", lambda: self._kubectl("get", "serviceaccount", "default", "-o=name") != "")
        self._wait("coredns", lambda: "OK" in self._inside("curl", "-s", "http://127.0.0.1:8181/ready"))
        self._wait("kube-proxy", lambda: self._inside("curl", "-s", "http://127.0.0.1:10249/healthz") != "")

    def _commands(self) -> dict[str, list[str]]:
        """Return the command lines with which this cluster was started: its programs and images may have been built again since."""
        return json.loads((self.run / "commands.json").read_text())

    def _spawn(self, commands: dict[str, list[str]], *names: str) -> None:
        for name in names:
            self.machine.spawn(name, commands[name], {"PATH": packages.SEARCH_PATH, "HOME": str(self.run)})

    def _wait(self, component: str, condition: Callable[[], bool], *others: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if ended := self._ended([component, *others]):
                code = self.machine.exit_code(ended[0])
                raise ComponentFailed(self._report(ended[0], f"ended with code {code} before it was ready"))
            if time.monotonic() > deadline:
                raise ComponentFailed(self._report(component, f"was not ready within {seconds:.0f} s"))
            time.sleep(0.1)

    def _ended(self, names: list[str]) -> list[str]:
        return [name for name in names if self.machine.exit_code(name) is not None]

    def _report(self, component: str, what: str) -> str:
        return (
            f"{component} {what}. Its last lines:\n{self.machine.tail(component)}\nAll logs: {self._kept_logs}. Start again with "
            "`python -m e2e.cluster up`. If this repeats, correct the flag or the kernel feature that the lines above name."
        )

    @property
    def _lock(self) -> Path:
        return cache_root() / "locks" / self.name

    @property
    def _kept_logs(self) -> Path:
        return cache_root() / "failed-start" / self.name

    def _keep_logs(self) -> None:
        """Copy the logs: a failed start removes the run directory."""
        self._kept_logs.mkdir(parents=True, exist_ok=True)
        for log in self.machine.logs.glob("*.log"):
            (self._kept_logs / log.name).write_bytes(log.read_bytes())

    def _kubectl(self, *arguments: str) -> str:
        return self._inside("kubectl", *arguments)

    def _inside(self, *command: str) -> str:
        """Return the output of a command in the cluster's network; empty if it failed."""
        found = subprocess.run([*self.machine.inside(), *command], env=self.environment, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    def _ctr(self, *arguments: str) -> str:
        command = ["ctr", f"--address={self.run / 'containerd.sock'}", "--connect-timeout=2s", "--namespace=k8s.io", *arguments]
        found = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    def _check_paths(self) -> None:
        if any(cache_root().resolve().is_relative_to(folder) for folder in _OVERLAID):
            raise packages.MachineUnfit(f"FAIRLEAD_CACHE={cache_root()} must not be under {', '.join(_OVERLAID)}: choose another folder.")
        longest = len(str(self.run / "containerd.sock.ttrpc"))
        if longest > 107:
            raise packages.MachineUnfit(f"FAIRLEAD_CACHE={cache_root()} is too long a path for unix sockets: {longest} bytes of 107.")
