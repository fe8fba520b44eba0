"""The Debian packages that a cluster on this machine and its images need. Missing ones are installed if this process runs as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e import progress

# Program → package. /usr/sbin is searched too: it is not on every user's PATH.
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
    """This machine cannot run a cluster. The message names what is missing, and alternatives."""


def missing() -> list[str]:
    """Return the names of the packages that are not installed."""
    packages = {package for program, package in PROGRAMS.items() if shutil.which(program, path=SEARCH_PATH) is None}
    if cni_folder() is None:
        packages.add("containernetworking-plugins")
    return sorted(packages)


def cni_folder() -> Path | None:
    return next((folder for folder in CNI_FOLDERS if (folder / "ptp").exists()), None)


def ensure() -> None:
    """Install missing packages with apt-get. Raises MachineUnfit, with the exact command, where that fails."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise MachineUnfit("A cluster on this machine needs root on Linux. Run as root, or set KUBECONFIG, or install docker and kind.")
    packages = missing()
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if shutil.which("apt-get") is None:
        raise MachineUnfit(
            f"Programs of Debian's packages {', '.join(packages)} are missing, and there is no apt-get: install them manually."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"install Debian packages {' '.join(packages)}"):
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True)
            result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0 or missing():
            tail = "\n".join(result.stdout.splitlines()[-10:])
            raise MachineUnfit(f"`{' '.join(command)}` failed. Run it manually to see why. Its last lines:\n{tail}")
