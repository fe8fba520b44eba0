"""`kubectl fairlead outdated`: which services, why, and for scripts."""

import json
from typing import Any, cast

import pytest
import yaml

from fairlead.kube import outdated
from fairlead.kube.api import Kube
from fairlead.kube.outdated import OutdatedOptions, find_outdated, run_outdated


def revision(component: str, image: str, *, pods: int = 2, desired: bool = True, digest: str = "0123456789") -> dict[str, Any]:
    name = f"qwen-{component}-{digest}"
    return {"name": name, "component": component, "image": image, "replicas": pods, "readyReplicas": pods, "desired": desired}


def service(name: str, phase: str, reason: str, message: str, *revisions: dict[str, Any], progress: str = "Complete") -> dict[str, Any]:
    conditions = [
        {"type": "UpToDate", "status": "True" if phase == "Current" else "False", "reason": reason, "message": message},
        {"type": "Progressing", "status": "False", "reason": progress, "message": "spec.rollout.paused holds it"},
    ]
    update = {"phase": phase, "workerImage": "worker:2", "routerImage": "control:2"}
    status = {"imageUpdate": update, "conditions": conditions, "revisions": list(revisions)}
    return {"metadata": {"namespace": "team", "name": name}, "status": status}


OLD = (revision("worker", "worker:1"), revision("router", "control:1", pods=1))
NEW = (revision("worker", "worker:2"), revision("router", "control:2", pods=1))
SERVICES = [
    service("current", "Current", "Current", "", *NEW),
    service("pinned", "Pinned", "Pinned", "spec.rollout.engineVersion is Pinned", *OLD),
    service("waits", "Waiting", "WaitingForWave", "the service waits for its wave", *OLD),
    service(
        "paused", "Current", "Current", "", revision("worker", "worker:2", pods=0),
        revision("worker", "worker:2", desired=False, digest="abcdefabcd"), NEW[1], progress="Paused",
    ),
    service("asleep", "Waiting", "WaitingForWave", "the service waits for its wave", revision("worker", "worker:1", pods=0), NEW[1]),
    {"metadata": {"namespace": "team", "name": "new"}},
]  # fmt: skip


def test_what_is_outdated_is_listed_with_the_reason() -> None:
    found = [(one.name, one.component, one.reason, one.image, one.newest, one.pods) for one in find_outdated(SERVICES)]
    assert found == [
        ("pinned", "worker", "Pinned", "worker:1", "worker:2", "2/2"),
        ("pinned", "router", "Pinned", "control:1", "control:2", "1/1"),
        ("waits", "worker", "WaitingForWave", "worker:1", "worker:2", "2/2"),
        ("waits", "router", "WaitingForWave", "control:1", "control:2", "1/1"),
        ("paused", "worker", "Paused", "worker:2", "worker:2", "0/2"),
        ("asleep", "worker", "WaitingForWave", "worker:1", "worker:2", "0/0"),
    ]


class Cluster:
    namespace = "team"

    def __init__(self, services: list[dict[str, Any]]) -> None:
        self._services = services

    def services(self, namespace: str) -> list[dict[str, Any]]:
        assert namespace == "team"
        return self._services


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_it_is_printed_for_people_and_for_scripts(output: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(outdated.Kube, "connect", lambda *_: cast(Kube, Cluster(SERVICES)))
    assert run_outdated(OutdatedOptions(output=output)) == 1
    text = capsys.readouterr().out
    if output == "table":
        assert "WaitingForWave" in text and "team/pinned: spec.rollout.engineVersion is Pinned" in text and "current" not in text
    else:
        rows = json.loads(text) if output == "json" else yaml.safe_load(text)
        assert [row["name"] for row in rows] == ["pinned", "pinned", "waits", "waits", "paused", "asleep"] and rows[0][
            "newest"
        ] == "worker:2"


def test_nothing_outdated_is_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(outdated.Kube, "connect", lambda *_: cast(Kube, Cluster(SERVICES[:1])))
    assert run_outdated(OutdatedOptions()) == 0 and "newest images" in capsys.readouterr().out
