"""Enforces the cluster's NetworkPolicies with nftables: its pod network (CNI plugin `ptp`) routes all traffic and ignores policies.

Only ingress is enforced, as Fairlead's policies restrict nothing else. As in other engines, a pod's own node is always allowed: probes
come from there.
"""

import json
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from e2e import progress
from e2e.cluster import Cluster
from e2e.cluster.cluster import CommandFailed

TABLE = "fairlead-e2e-policies"
_NOTHING = f"table ip {TABLE} {{}}\ndelete table ip {TABLE}\n"
PERIOD = 0.5  # seconds between two looks at policies and pods
LONGEST_READ = 30.0  # seconds of one look


class PolicyEngine:
    """Keeps the rules equal to the policies while the `with` block runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self._rules = ""
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "PolicyEngine":
        self._update()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:  # an update that is under way would load rules after their removal
            self._ended.set()
            self._load(_NOTHING)
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Enforce nothing in the block."""
        with self._lock:
            self._load(_NOTHING)
            self._rules = ""
            yield
            self._update()

    def _follow(self) -> None:
        try:
            while not self._ended.wait(PERIOD):
                with self._lock:
                    if not self._ended.is_set():
                        self._try_update()
        except BaseException as failure:  # raised again at the end of the block
            self._failure = failure

    def _try_update(self) -> None:
        """Update, or keep the rules until the next look if the API server does not answer."""
        try:
            self._update()
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            progress.say(f"the rules of NetworkPolicies are not updated, next try in {PERIOD} s: {error}")

    def _update(self) -> None:
        kinds = "networkpolicies,pods,namespaces"
        listed = json.loads(self._cluster.kubectl("get", kinds, "-A", "-o", "json", timeout=LONGEST_READ).stdout)["items"]
        policies, pods, namespaces = ([one for one in listed if one["kind"] == kind] for kind in ("NetworkPolicy", "Pod", "Namespace"))
        rules = derive_rules(policies, pods, namespaces)
        if rules != self._rules:
            self._load(rules)
            self._rules = rules

    def _load(self, rules: str) -> None:
        done = self._cluster.exec_in_netns(["nft", "-f", "-"], input=rules, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"nft refuses the rules: {done.stderr}\n{rules}")


def derive_rules(policies: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], namespaces: Iterable[Mapping[str, Any]]) -> str:
    """Return a script for nft that replaces the table: established connections, what the policies allow, and nothing else to their pods.

    What is refused gets `admin-prohibited`, which a client sees as EHOSTUNREACH: a closed port would be ECONNREFUSED.
    """
    addressed = [pod for pod in pods if pod.get("status", {}).get("podIP") and not pod["spec"].get("hostNetwork")]
    labels = {one["metadata"]["name"]: one["metadata"].get("labels", {}) for one in namespaces}
    allowed, isolated = set(), set()
    for policy in policies:
        if "Ingress" not in policy["spec"].get("policyTypes", ["Ingress"]):
            continue
        namespace = policy["metadata"]["namespace"]
        chosen = {"podSelector": policy["spec"].get("podSelector", {})}
        for pod in _select(chosen, namespace, addressed, labels):
            isolated.add(pod["status"]["podIP"])
            for rule in policy["spec"].get("ingress", []):
                sources = {
                    other["status"]["podIP"] for peer in rule.get("from", []) for other in _select(peer, namespace, addressed, labels)
                }
                allowed |= set(_allow(pod["status"]["podIP"], sources if "from" in rule else None, rule.get("ports")))
    lines = ["type filter hook forward priority 10; policy accept;", "ct state established,related accept", *sorted(allowed)]
    if isolated:
        lines.append(f"ip daddr {_set(isolated)} reject with icmp type admin-prohibited")
    body = "\n    ".join(lines)
    return f"{_NOTHING}table ip {TABLE} {{\n  chain forward {{\n    {body}\n  }}\n}}\n"


def _allow(pod: str, sources: set[str] | None, ports: list[dict[str, Any]] | None) -> list[str]:
    """Return the rules for one pod. `sources`: None: any. `ports`: None: all."""
    if sources is not None and not sources:
        return []
    start = f"ip saddr {_set(sources)} ip daddr {pod}" if sources is not None else f"ip daddr {pod}"
    if not ports:
        return [f"{start} accept"]
    return [f"{start} {port.get('protocol', 'TCP').lower()} dport {int(port['port'])} accept" for port in ports]


def _set(addresses: Iterable[str]) -> str:
    return f"{{ {', '.join(sorted(addresses))} }}"


def _select(
    peer: Mapping[str, Any], home: str, pods: Iterable[Mapping[str, Any]], labels: Mapping[str, Mapping[str, str]]
) -> list[Mapping[str, Any]]:
    """Return the pods of a peer: in namespaces that its namespaceSelector selects, otherwise in the policy's own."""
    if "ipBlock" in peer:
        raise NotImplementedError("ipBlock: no policy of Fairlead has one")
    found = []
    for pod in pods:
        namespace = pod["metadata"]["namespace"]
        here = _matches(peer["namespaceSelector"], labels[namespace]) if "namespaceSelector" in peer else namespace == home
        if here and _matches(peer.get("podSelector", {}), pod["metadata"].get("labels", {})):
            found.append(pod)
    return found


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if any(labels.get(name) != value for name, value in selector.get("matchLabels", {}).items()):
        return False
    for needed in selector.get("matchExpressions", []):
        value, values = labels.get(needed["key"]), needed.get("values", [])
        holds = {"In": value in values, "NotIn": value not in values, "Exists": value is not None, "DoesNotExist": value is None}
        if not holds[needed["operator"]]:
            return False
    return True
