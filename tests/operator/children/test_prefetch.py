"""`spec.model.cache.prefetch`: the Job that fills a claim ahead of workers, and the condition ModelCached."""

import copy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, container, pod, service

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.kube.difference import with_digest
from fairlead_operator.observed import Observed, PodEvent
from fairlead_operator.revisions import worker_revision

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CACHE = {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}


def prefetching(**spec: Any) -> InferenceService:
    return service(**{"model": {"cache": CACHE, **spec.pop("model", {})}, **spec})


def job_of(one: InferenceService, settings: Any = SETTINGS) -> Any:
    (made,) = [each for each in desired(one, Observed(), settings, NOW).objects if each["kind"] == "Job"]
    return made


def condition(one: InferenceService, observed: Observed) -> tuple[str, str, str]:
    (found,) = [each for each in desired(one, observed, SETTINGS, NOW).status.conditions if each.type == "ModelCached"]
    return found.status, found.reason, found.message


def test_a_job_downloads_all_models_into_the_claim_without_a_gpu() -> None:
    adapters = [{"name": "sql", "uri": "hf://lab/sql"}, {"name": "own", "uri": "pvc://loras/own"}]
    draft = {"speculativeDecoding": {"method": "Draft", "draftModelURI": "gs://models/draft"}}
    one = prefetching(model={"uri": "hf://a/b", "revision": "v1", "adapters": adapters, "secretRef": {"name": "hub"}}, engine=draft)
    spec = job_of(one)["spec"]["template"]["spec"]
    (worker,) = spec["containers"]
    assert worker["command"] == ["fairlead-prefetch"]
    assert worker["args"] == ["--cache=/var/cache/fairlead", "--adapter=hf://lab/sql", "hf://a/b@v1", "gs://models/draft"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in spec["volumes"] and len(spec["volumes"]) == 2
    assert {"name": "HF_HOME", "value": "/var/cache/fairlead"} in worker["env"] and "HF_TOKEN" in {each["name"] for each in worker["env"]}
    assert set(worker["resources"]["limits"]) == {"cpu", "memory"} and "affinity" not in spec and spec["restartPolicy"] == "OnFailure"
    assert spec["securityContext"]["runAsNonRoot"] and worker["securityContext"]["readOnlyRootFilesystem"]


def test_the_worker_of_an_image_takes_the_arguments_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from fairlead_worker.weights import prefetch

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(prefetch, "resolve", lambda uri, *_, required_file: asked.append((uri, required_file)))
    one = prefetching(model={"adapters": [{"name": "sql", "uri": "hf://lab/sql"}]})
    assert prefetch.main(job_of(one)["spec"]["template"]["spec"]["containers"][0]["args"]) == 0
    assert asked == [("hf://Qwen/Qwen3-8B", "config.json"), ("hf://lab/sql", "adapter_config.json")]


def test_the_pod_template_applies_to_the_job_without_its_devices() -> None:
    resources = {"requests": {"cpu": "6", "nvidia.com/gpu": "1"}, "limits": {"cpu": "6", "nvidia.com/gpu": "1"}}
    proxy = {"name": "HTTPS_PROXY", "value": "http://p"}
    own = {"name": "worker", "env": [proxy], "resources": resources, "securityContext": {"runAsUser": 7}}
    template = {
        "metadata": {"labels": {"team": "a", "sidecar.istio.io/inject": "true"}, "annotations": {"x": "y"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"zone": "a"},
            "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "rdma"}],
            "volumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
            "containers": [own, {"name": "side", "image": "s"}],
            "securityContext": {"fsGroup": 7},
        },
    }
    pod = job_of(prefetching(podTemplate=template))["spec"]["template"]
    metadata, spec = pod["metadata"], pod["spec"]
    assert metadata["labels"]["team"] == "a" and metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["x"] == "y" and metadata["labels"]["app.kubernetes.io/component"] == "prefetch"
    assert spec["nodeSelector"] == {"zone": "a"} and spec["tolerations"] == [{"operator": "Exists"}] and "resourceClaims" not in spec
    assert "ca" in {each["name"] for each in spec["volumes"]}
    (worker,) = spec["containers"]
    assert proxy in worker["env"]
    assert worker["resources"] == {"requests": {"cpu": "6", "memory": "1Gi"}, "limits": {"cpu": "6", "memory": "4Gi"}}
    assert worker["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 7


@pytest.mark.parametrize(
    ("given", "requested", "limit"),
    [
        ({"limits": {"cpu": "8"}}, "500m", "8"),
        ({"limits": {"cpu": 8}}, "500m", 8),
        ({"limits": {"cpu": "250m"}}, None, "250m"),
        ({"limits": {"cpu": "8e0"}}, "500m", "8e0"),
        ({"limits": {"cpu": "8."}}, None, "8."),
        ({"requests": {"cpu": "1"}}, "1", "4"),
        ({"requests": {"cpu": "6"}}, "6", None),
    ],
)
def test_one_amount_of_the_pod_template_leaves_the_other_as_it_is(given: Any, requested: Any, limit: Any) -> None:
    """Kubernetes takes a limit alone for the request too: the limit that a quota wants of workers is more than a download needs."""
    job = job_of(prefetching(podTemplate={"spec": {"containers": [{"name": "worker", "resources": given}]}}))
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert (worker["resources"]["requests"].get("cpu"), worker["resources"]["limits"].get("cpu")) == (requested, limit)
    assert worker["resources"]["requests"]["memory"] == "1Gi" and worker["resources"]["limits"]["memory"] == "4Gi"


def test_a_job_that_gets_no_pod_is_a_fault_with_the_field_that_it_lacks() -> None:
    one = prefetching(replicas=0)
    live = stored(job_of(one)) | {"status": {"startTime": "2026-01-01T00:00:00Z"}}
    name = live["metadata"]["name"]
    assert condition(one, Observed(jobs=(live,)))[:2] == ("False", "Starting")
    words = f'pods "{name}-x" is forbidden: failed quota: team: must specify limits.ephemeral-storage for: worker'
    refused = Observed(jobs=(live,), pod_events={name: PodEvent("FailedCreate", words)})
    status, reason, message = condition(one, refused)
    assert (status, reason) == ("False", "QuotaExceeded") and "limits.ephemeral-storage of container worker in spec.podTemplate" in message
    (degraded,) = [each for each in desired(one, refused, SETTINGS, NOW).status.conditions if each.type == "Degraded"]
    assert (degraded.status, degraded.reason) == ("True", "QuotaExceeded")
    runs = Observed(jobs=(live | {"status": {"active": 1}},), pod_events=refused.pod_events)
    assert condition(one, runs)[:2] == ("False", "Downloading"), "the Event stays for an hour"


def test_another_model_is_another_job_and_no_worker_restarts_for_prefetch_itself() -> None:
    plain = service(model={"cache": {"persistentVolumeClaim": {"claimName": "models"}}})
    assert worker_revision(plain) == worker_revision(prefetching())
    assert not [each for each in desired(plain, Observed(), SETTINGS, NOW).objects if each["kind"] == "Job"]
    names = {job_of(one)["metadata"]["name"] for one in (prefetching(), prefetching(replicas=0), prefetching(engine={"maxNumSeqs": 3}))}
    assert len(names) == 1, "only what is downloaded names the Job"
    assert job_of(prefetching(model={"uri": "hf://a/c"}))["metadata"]["name"] not in names
    long = InferenceService("q" * 52, "default", prefetching().spec, uid="u")
    assert len(job_of(long)["metadata"]["name"]) <= 63


def stored(job: Any) -> Any:
    """The Job as the API server has it: with the digest of what was sent, with defaults, and with the labels of its controller."""
    live = copy.deepcopy(with_digest(job))
    live["metadata"] |= {"uid": "job-1", "resourceVersion": "7"}
    live["spec"]["template"]["metadata"] |= {"creationTimestamp": None}
    live["spec"]["template"]["metadata"]["labels"] |= {"batch.kubernetes.io/controller-uid": "job-1"}
    live["spec"]["template"]["spec"] |= {"dnsPolicy": "ClusterFirst"}
    return live


def jobs_of(one: InferenceService, observed: Observed, settings: Any = SETTINGS) -> list[Any]:
    return [each for each in desired(one, observed, settings, NOW).objects if each["kind"] == "Job"]


def image_of(job: Any) -> str:
    return str(job["spec"]["template"]["spec"]["containers"][0]["image"])


def test_an_upgrade_of_the_operator_replaces_no_job() -> None:
    one = prefetching()
    first = desired(one, Observed(), SETTINGS, NOW)
    (job,) = [each for each in first.objects if each["kind"] == "Job"]
    live = stored(job)
    assert jobs_of(one, Observed(jobs=(live,))) == [job], "nothing is sent again"
    upgraded = replace(SETTINGS, worker_image="worker:2", image_pull_policy="Always", image_pull_secrets=("registry",))
    (kept,) = jobs_of(one, Observed(jobs=(live,)), upgraded)
    assert kept["metadata"]["name"] == job["metadata"]["name"] and image_of(kept) == "worker:1"
    template = copy.deepcopy(live["spec"]["template"])
    del template["metadata"]["creationTimestamp"]
    assert kept["spec"]["template"] == template, "a Job's template is immutable: a write that changes or drops a field is refused"
    assert jobs_of(one, Observed(jobs=(stored(kept),)), upgraded) == [kept], "it is sent once"


def test_a_new_job_runs_the_image_of_the_workers() -> None:
    upgraded = replace(SETTINGS, worker_image="worker:2")
    first = desired(prefetching(), Observed(), SETTINGS, NOW).objects
    (worker,) = [each for each in first if each["kind"] == "Deployment" and each["metadata"]["name"] == "qwen-worker"]
    running = Observed(deployments={"worker": worker}, revisions=tuple(each for each in first if each["kind"] == "ControllerRevision"))
    (job,) = jobs_of(prefetching(model={"uri": "hf://a/c"}), running, upgraded)
    assert image_of(job) == "worker:1", "the newest image comes with the service's wave"
    assert image_of(job_of(prefetching(), upgraded)) == "worker:2", "the first one of a service has no workers yet"
    (own,) = jobs_of(prefetching(engine={"image": "worker:mine"}), running, upgraded)
    assert image_of(own) == "worker:mine" and own["metadata"]["name"] != job_of(prefetching())["metadata"]["name"]


def test_the_condition_follows_the_job() -> None:
    one = prefetching(replicas=0)
    job = job_of(one)
    name, revision = job["metadata"]["name"], job["spec"]["template"]["metadata"]["labels"]["fairlead.dev/revision"]
    assert condition(one, Observed())[:2] == ("False", "Starting")
    complete = stored(job) | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    assert condition(one, Observed(jobs=(complete,)))[:2] == ("True", "Cached")
    other = complete | {"metadata": {"name": "qwen-prefetch-0000000000"}}
    assert condition(one, Observed(jobs=(other,)))[:2] == ("False", "Starting"), "of the model before"
    failing = pod(
        "qwen-prefetch-x",
        "prefetch",
        revision,
        containerStatuses=[
            container(
                {"waiting": {"reason": "CrashLoopBackOff"}},
                {"terminated": {"exitCode": 1, "message": "cannot load model hf://a/b: the repository is gated (403): accept its terms"}},
            )
        ],
    )
    status, reason, message = condition(one, Observed(pods=(failing,)))
    assert (status, reason) == ("False", "HubForbidden") and "gated" in message
    degraded = next(each for each in desired(one, Observed(pods=(failing,)), SETTINGS, NOW).status.conditions if each.type == "Degraded")
    assert degraded.reason == "HubForbidden"
    failed = stored(job) | {
        "status": {"conditions": [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]},
    }
    assert condition(one, Observed(jobs=(failed,)))[1:] == (
        "PrefetchFailed",
        f"Job {name} failed: BackoffLimitExceeded. Correct spec.model, or repeat it with kubectl delete job {name}",
    )
