"""The Debian packages that a cluster of our own and its images need; installed when missing and we may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e import progress

# program: package. /usr/sbin is searched too, for it is not on everyone's PATH.
PROGRAMS = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))


class MachineUnfit(RuntimeError):
    """This machine cannot carry a cluster of ours; the message says what is missing and what else would do."""


def missing() -> list[str]:
    """Names of the packages that are not installed."""
    packages = {package for program, package in PROGRAMS.items() if shutil.which(program, path=SEARCH_PATH) is None}
    if cni_folder() is None:
        packages.add("containernetworking-plugins")
    return sorted(packages)


def cni_folder() -> Path | None:
    return next((folder for folder in CNI_FOLDERS if (folder / "ptp").exists()), None)


def ensure() -> None:
    """Installs what is missing, with apt-get as root; raises MachineUnfit with the exact command otherwise."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise MachineUnfit("A Kubernetes of our own needs root on Linux. Run as root, or set KUBECONFIG, or install docker and kind.")
    packages = missing()
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if shutil.which("apt-get") is None:
        raise MachineUnfit(f"Missing programs, in Debian's packages {', '.join(packages)}, and there is no apt-get: install them by hand.")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"install Debian packages {' '.join(packages)}"):
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True)
            result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0 or missing():
            tail = "\n".join(result.stdout.splitlines()[-10:])
            raise MachineUnfit(f"`{' '.join(command)}` failed. Run it by hand to see why; its last lines:\n{tail}")
