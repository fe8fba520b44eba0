"""Each field of each source is in the result or listed; the operator makes pods of the result; nothing is silent."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.cli.migrate.samples import DEPLOYMENT, ISVC, LLM, MODEL, STACK, VALUES, Body, load, migrate
from tests.operator.support.manifests import SETTINGS

from fairlead.migrate.command import convert
from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed

CARRIED_AS_A_WHOLE = ("spec.selector", "volumes", "volumeMounts", "secretKeyRef", "valueFrom")
"""Sections in which Kubernetes has no other fields than those that the result has, or that select the old pods."""


def sections(value: Any, path: str = "") -> list[tuple[str, Body]]:
    """Return each section of a source, with its path."""
    if isinstance(value, list):
        return [found for number, child in enumerate(value) for found in sections(child, f"{path}[{number}]")]
    if not isinstance(value, dict):
        return []
    return [(path, value), *(found for name, child in value.items() for found in sections(child, f"{path}.{name}".lstrip(".")))]


SOURCES = (DEPLOYMENT, LLM.replace("VERSION", "v1alpha2"), ISVC.replace("URI", "hf://a/b"), STACK, MODEL, VALUES)


@pytest.mark.parametrize("text", SOURCES)
def test_the_operator_makes_pods_of_each_result(text: str) -> None:
    """Of its pod template too: no path is mounted twice, and each mount has a volume of one kind."""
    for body in migrate(text)[0]:
        body["metadata"] |= {"uid": "uid-1", "generation": 1}
        children = desired(
            InferenceService.parse(body), Observed(), replace(SETTINGS, vllm_image="vllm:1"), datetime(2026, 1, 1, tzinfo=UTC)
        )
        (worker,) = [one for one in children.objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-worker")]
        pod = worker["spec"]["template"]["spec"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert len(volumes) == len(pod["volumes"]) and all(len(one) == 2 for one in volumes.values())
        for container in (*pod["containers"], *pod["initContainers"]):
            mounts = container.get("volumeMounts", [])
            assert container["image"] and len({one["mountPath"] for one in mounts}) == len(mounts)
            assert {one["name"] for one in mounts} <= volumes.keys()


@pytest.mark.parametrize("text", SOURCES)
def test_a_field_that_no_table_knows_is_carried_over_or_listed_wherever_it_stands(text: str) -> None:
    for number in range(len(sections(load(text)[0]))):
        body = load(text)[0]
        path, section = sections(body)[number]
        if any(one in path for one in CARRIED_AS_A_WHOLE):
            continue
        section["unknownField"] = "carried-or-listed"
        result = convert([body])
        named = [one.split(": ", 1)[1].split(" ")[0].rstrip(":") for one in result.messages]
        listed = result.failures or any(one and f"{path}.unknownField".lstrip(".").startswith(one) for one in named)
        assert listed or "carried-or-listed" in "\n".join(result.documents), path


NO_EFFECT = re.compile(
    r"metadata\.resourceVersion|.*containers\[\d\]\.name|loraAdapters\[0\]\.name|.*emptyDir\.medium|.*vllmConfig\.v1"
    r"|.*containers\[1\]\.env\[1\]\.valueFrom.*"  # of the API key, which is listed
    r"|.*resources\.limits|.*nvidia\.com/gpu"  # the other of the two, or --tensor-parallel-size, says the same
    r"|.*modelSpec\[1\]\.pvcStorage"  # beside pvcExistingClaimName
)


@pytest.mark.parametrize("text", SOURCES)
def test_no_field_vanishes(text: str) -> None:
    """Without any field, the result or its notes differ."""
    whole = convert(load(text))
    for number, name in [(number, name) for number, (_, section) in enumerate(sections(load(text)[0])) for name in section]:
        body = load(text)[0]
        path, section = sections(body)[number]
        if section.pop(name) and not NO_EFFECT.fullmatch(f"{path}.{name}".lstrip(".")):
            result = convert([body])
            assert (result.documents, result.messages) != (whole.documents, whole.messages), f"{path}.{name}"


@pytest.mark.parametrize("text", SOURCES)
def test_a_value_of_another_type_is_carried_over_listed_or_refused(text: str) -> None:
    """Never a traceback, and never silence."""
    wrong: tuple[Any, ...] = (3, "x", [], [3], {"a": 1}, None, [{}])
    names = [(number, name) for number, (_, section) in enumerate(sections(load(text)[0])) for name in section]
    for turn, (number, name) in enumerate(names):
        body = load(text)[0]
        section = sections(body)[number][1]
        section[name] = wrong[turn % len(wrong)]
        result = convert([body])
        assert result.messages and (result.documents or result.failures or "left out" in result.messages[0]), (name, section)
