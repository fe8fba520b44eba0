"""`python -m e2e.cluster build | up | down | status | env | exec -- COMMAND | kubectl ... | helm ...`"""

from __future__ import annotations

import argparse
import subprocess
import sys

from e2e import progress

from . import binaries, images, packages, store
from .local import ComponentFailed, LocalKubernetes
from .machine import MachineFailed

_FAILURES = (binaries.BuildFailed, store.NotStored, ComponentFailed, MachineFailed, images.ImageFailed, packages.MachineUnfit)


def main() -> int:
    """Run the action. Return its exit code, or that of the command that ran inside the cluster's network."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A real Kubernetes on this machine.")
    parser.add_argument("--name", default="default", help="name of the cluster; several can run at the same time")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in {
        "build": "install Debian's packages and build Kubernetes into the cache (minutes, once on a machine)",
        "up": "build what is missing, and start the cluster if it does not run",
        "down": "stop the cluster and remove its state; the cache stays",
        "status": "show whether the cluster runs, and how to use it",
    }.items():
        actions.add_parser(action, help=text)
    actions.choices["down"].add_argument("--purge", action="store_true", help="also remove its imported images")
    for action in ("kubectl", "helm", "exec"):
        inside = actions.add_parser(action, help="run a command in the cluster's network", add_help=False)
        inside.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    kubernetes = LocalKubernetes(options.name)
    try:
        if options.action == "build":
            packages.ensure()
            binaries.build()
            progress.say("Kubernetes, CoreDNS, Helm, Prometheus and kubeconform are built")
            return 0
        if options.action == "up":
            kubernetes.up(keep=True)
        elif options.action == "down":
            kubernetes.down(options.purge)
        elif options.action != "status":
            arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
            command = arguments if options.action == "exec" else [options.action, *arguments]
            return subprocess.run([*kubernetes.machine.inside(), *command], env=kubernetes.environment).returncode
    except _FAILURES as failure:
        print(failure, file=sys.stderr)
        return 1
    if options.action != "down":
        print(_status(kubernetes))
    return 0 if options.action != "status" or kubernetes.running else 1


def _status(kubernetes: LocalKubernetes) -> str:
    if not kubernetes.running:
        return f"cluster {kubernetes.name} does not run: start it with `python -m e2e.cluster up`"
    return (
        f"cluster {kubernetes.name} runs\n  logs        {kubernetes.machine.logs}\n  KUBECONFIG  {kubernetes.kubeconfig}"
        "  (reachable from inside its network only)\n  use         python -m e2e.cluster kubectl get pods -A"
    )


if __name__ == "__main__":
    sys.exit(main())
