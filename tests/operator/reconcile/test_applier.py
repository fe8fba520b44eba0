"""The applier remembers the children that exist, and no others."""

from typing import Any

from tests.operator.simulated.api import Api
from tests.operator.simulated.operator import finished

from fairlead_operator.kube.cache import Cache
from fairlead_operator.reconcile.applier import Applier


def revision(number: int) -> dict[str, Any]:
    metadata = {"name": f"qwen-worker-{number}", "namespace": "default", "labels": {"app.kubernetes.io/instance": "qwen"}}
    owner = {"kind": "InferenceService", "name": "qwen", "uid": "uid-1", "controller": True}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {**metadata, "ownerReferences": [owner]},
        "revision": number,
        "data": {},
    }


def test_a_hundred_edits_leave_no_memory_of_deleted_revisions() -> None:
    api, cache = Api(), Cache(lambda owner: None)
    api.put({"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "qwen"}})
    applier = Applier(api, cache, "default", "qwen", "uid-1")  # type: ignore[arg-type]
    for number in range(100):
        assert finished(applier.converge([revision(number), revision(number + 1)])) == {}
    assert set(applier._applied) == {("ControllerRevision", f"qwen-worker-{number}") for number in (99, 100)}
