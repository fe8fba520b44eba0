"""The quick start: install the chart, apply six lines, call the endpoint. Then scale, delete a pod, edit a child, delete the service."""

from collections.abc import Iterator

import pytest

from e2e.service import Load, Service
from e2e.system import System, eventually, read_result

PROMPT = "A fairlead is a ring that guides a rope and keeps it from chafing on the deck. " * 10


@pytest.fixture(scope="module")
def service(system: System) -> Iterator[Service]:
    """Apply the six-line manifest right after `helm install`, before the operator runs."""
    system.install()
    service = Service(system, "tiny")
    manifest = f"apiVersion: fairlead.dev/v1alpha1\nkind: InferenceService\nmetadata:\n  name: {service.name}\nspec:\n  model: {{uri: 'file:///models/tiny'}}\n"
    assert len(manifest.strip().splitlines()) == 6
    with service.deleted_afterwards():
        system.cluster.kubectl("apply", "-n", system.models, "-f", "-", input=manifest)
        yield service


def test_six_lines_become_ready(service: Service) -> None:
    status = service.wait_ready(replicas=1, seconds=300)
    assert status["url"] == service.url
    listing = service.system.cluster.kubectl("get", "infer", "-n", service.system.models).stdout
    header, row = (line.split() for line in listing.strip().splitlines())
    assert header == ["NAME", "MODEL", "DESIRED", "READY", "REASON", "URL", "AGE"]
    columns = dict(zip(header, row, strict=False))
    assert (columns["NAME"], columns["DESIRED"], columns["READY"]) == ("tiny", "1", "1") and service.url in row


def test_the_openai_client_streams_a_chat_and_the_same_prefix_returns_to_its_pod(service: Service) -> None:
    service.wait_ready()
    service.scale(3)
    service.wait_ready(replicas=3)
    # Computing these again costs more than the differences between the pods' measured speeds. Only the index can predict cached tokens.
    prompts = [f"Conversation {number}. {PROMPT * 5}" for number in range(5)]
    asked = [service.system.client("chat.py", service.url, service.name, prompt, "16") for prompt in prompts]
    firsts = [read_result(client) for client in asked]
    for prompt, first in zip(prompts, firsts, strict=True):
        assert first["finish"] == "length" and first["completion_tokens"] == 16 and first["text"]
        again = service.chat(prompt)
        assert again["pod"] == first["pod"] and again["predicted"] > 0.8 * again["prompt_tokens"]
        assert again["cached"] > 0.8 * again["prompt_tokens"] and again["cached_header"] == again["cached"]
        assert again["text"] == first["text"]


def test_scaling_one_three_one_under_load_fails_no_request(service: Service) -> None:
    service.scale(1)
    service.wait_ready(replicas=1)
    with Load(service) as load:
        service.scale(3)
        service.wait_ready(replicas=3)
        service.scale(1)
        service.wait_ready(replicas=1)
        eventually(lambda: len(service.pods()) == 1, 120, "one worker pod left")
    load.assert_answered(at_least=11)


def test_a_pod_deleted_in_mid_stream_finishes_its_stream(service: Service) -> None:
    service.wait_ready(replicas=1)
    stream = service.system.client("chat.py", service.url, service.name, PROMPT, "1200")
    assert stream.stderr is not None
    pod = stream.stderr.readline().split()[-1]
    service.system.cluster.kubectl("delete", "pod", pod, "-n", service.system.models, "--wait=false")
    out, errors = stream.communicate(timeout=180)
    assert stream.returncode == 0, errors
    assert '"finish": "length"' in out and '"completion_tokens": 1200' in out
    eventually(lambda: pod not in [p["metadata"]["name"] for p in service.pods()], 60, f"{pod} gone")
    service.wait_ready(replicas=1)


def test_an_edited_deployment_is_restored(service: Service) -> None:
    service.wait_ready()
    name = f"{service.name}-worker"
    before = service.system.get("deployment", name)["spec"]
    patch = '{"spec": {"replicas": 0, "template": {"spec": {"containers": [{"name": "worker", "args": ["--model", "file:///nonsense"]}]}}}}'
    service.system.cluster.kubectl("patch", "deployment", name, "-n", service.system.models, "-p", patch)

    def is_restored() -> bool:
        now = service.system.get("deployment", name)["spec"]
        return now["replicas"] == before["replicas"] and now["template"] == before["template"]

    eventually(is_restored, 30, "the restored Deployment")
    service.wait_ready(replicas=1)


def test_deleting_the_service_leaves_nothing(service: Service) -> None:
    kinds = {entry.partition("/")[0] for entry in service.leftovers()}
    assert kinds >= {"Deployment", "Pod", "Service", "ControllerRevision", "NetworkPolicy", "Secret"}, "what is looked for is found before"
    service.delete()
    eventually(lambda: service.leftovers() == [], 150, "no child left")
