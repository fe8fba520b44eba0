"""A model that cannot load and requests that make no sense are answered with their cause."""

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.service import Service
from e2e.system import System, eventually, read_result


@pytest.fixture
def broken(installed: System) -> Iterator[Service]:
    service = Service(installed, "broken")
    yield service
    service.delete()


def test_a_model_that_cannot_load_is_reported_with_its_cause(broken: Service) -> None:
    broken.system.apply(broken.manifest(model={"uri": "file:///models/nowhere"}))

    def failed_pod() -> bool:
        statuses = [status for pod in broken.pods() for status in pod["status"].get("containerStatuses", [])]
        return any("terminated" in status.get("lastState", {}) or "terminated" in status["state"] for status in statuses)

    eventually(failed_pod, 180, "a worker that has ended")

    def ready_names_the_path() -> dict[str, Any] | None:
        ready = broken.condition("Ready")
        return ready if ready.get("status") == "False" and "/models/nowhere" in ready.get("message", "") else None

    eventually(ready_names_the_path, 60, "Ready=False with the path that does not exist")
    listing = broken.system.cluster.kubectl("get", "infer", broken.name, "-n", broken.system.models).stdout
    header, row = (line.split() for line in listing.strip().splitlines())
    assert dict(zip(header, row, strict=True)) | {"DESIRED": "1", "READY": "0", "REASON": "ModelNotFound"} == dict(
        zip(header, row, strict=True)
    )


@pytest.mark.long
def test_a_pod_that_fits_no_node_is_reported(broken: Service) -> None:
    broken.system.apply(broken.manifest(resources={"gpus": 1}))
    eventually(lambda: "nvidia.com/gpu" in broken.condition("Ready").get("message", ""), 120, "the missing GPU named in the status")


def test_malformed_requests_get_openai_errors_and_end_no_process(installed: System) -> None:
    service = Service(installed, "patient")
    with service.running(service.manifest(), replicas=1):
        answers = read_result(installed.client("malformed_requests.py", service.url, service.name))
        statuses = {mistake: status for mistake, (status, _) in answers.items()}
        assert statuses == {
            "bad json": 400,
            "unknown model": 404,
            "negative max_tokens": 400,
            "prompt too long": 400,
            "messages is a number": 400,
            "100 MB": 413,
            "good": 200,
        }
        errors = {mistake: body["error"] for mistake, (status, body) in answers.items() if status != 200}
        assert all(set(error) == {"message", "type", "param", "code"} and error["message"] for error in errors.values())
        assert errors["negative max_tokens"]["param"] == "max_tokens"
        assert errors["unknown model"]["code"] == "model_not_found"
        for component in ("worker", "router"):
            for pod in service.pods(component):
                assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [0]
