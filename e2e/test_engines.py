"""vLLM on the real cluster, behind operator, index and router: ready, rollout, drain, kill -9, and a change of the engine under load.

vLLM's CPU build comes from the cached environment of the benchmarks, which pods mount. The tests run in order on one service, because a
start of vLLM takes up to a minute of a core.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from bench.other_servers import environments

from e2e.availability import Availability, is_ready
from e2e.cluster.cluster import LocalCluster
from e2e.cluster.paths import cache_root
from e2e.service import Load, Service
from e2e.system import HERE, System, eventually
from e2e.volume import claim
from fairlead.random_model import make_model

READY_SECONDS = 600.0
MODEL_CLAIM, VLLM_CLAIM = "engine-models", "vllm"
ADAPTER = "sql"
MODEL = {"uri": f"pvc://{MODEL_CLAIM}/tiny", "adapters": [{"name": ADAPTER, "uri": f"pvc://{MODEL_CLAIM}/{ADAPTER}"}]}
KILL_BUSY_VLLM = """
import json, os, signal, time, urllib.request
give_up = time.monotonic() + 60
while not json.load(urllib.request.urlopen("http://127.0.0.1:8002/load", timeout=5))["running"]:
    assert time.monotonic() < give_up, "no request runs in this engine"
    time.sleep(0.05)
for entry in filter(str.isdigit, os.listdir("/proc")):
    words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\\0")
    if b"vllm.entrypoints.cli.main" in words or words[0].startswith(b"VLLM::"):
        os.kill(int(entry), signal.SIGKILL)
        print("killed", entry)
"""

pytestmark = pytest.mark.engines


class Engines:
    """One service, with either engine."""

    def __init__(self, system: System, image: str) -> None:
        self.service = Service(system, "engines")
        self._image = image

    def vllm(self, replicas: int = 1, **engine: Any) -> dict[str, Any]:
        """Return the manifest with vLLM. `engine`: further fields of `spec.engine`."""
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # not the same cores for each engine
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        mount = {"name": VLLM_CLAIM, "mountPath": "/opt/vllm", "readOnly": True}
        settings = {
            "runtime": "VLLM",
            "image": self._image,
            "maxModelLen": 2048,
            "kvCache": {"pages": 512},
            "args": ["--enforce-eager"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
        }
        template = {
            "initContainers": [{"name": "engine", "volumeMounts": [mount]}],
            "volumes": [{"name": VLLM_CLAIM, "persistentVolumeClaim": {"claimName": VLLM_CLAIM, "readOnly": True}}],
            "shareProcessNamespace": True,  # for kill -9 from the agent's container
        }
        engine = {**settings, **engine}
        return self.service.manifest(model=MODEL, replicas=replicas, engine=engine, podTemplate={"spec": template})

    def fairlead(self) -> dict[str, Any]:
        """Return the manifest with Fairlead's engine."""
        return self.service.manifest(model=MODEL, replicas=1)

    def apply(self, manifest: dict[str, Any]) -> None:
        """Apply a manifest, and wait until only pods of its revision exist."""
        before = self.uids()
        self.service.system.apply(manifest)
        replicas = manifest["spec"]["replicas"]
        self.service.wait_ready(replicas=replicas, seconds=READY_SECONDS)
        eventually(lambda: len(self.uids()) == replicas and not self.uids() & before, 120, "only pods of the new revision")

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.service.pods()}


@pytest.fixture(scope="module")
def engines(installed: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A service with one vLLM worker."""
    if not isinstance(installed.cluster, LocalCluster):
        pytest.skip("the pods mount vLLM's environment from this machine")
    environment = environments.make("vllm", cache_root() / "peers")
    models = tmp_path_factory.mktemp("models") / "claim"
    make_model(models / "tiny", hidden=128, heads=2, kv_heads=1, seed=7)
    from tests.lora import save_adapter  # imports torch, which other end-to-end tests do not need
    from transformers import AutoModelForCausalLM

    save_adapter(AutoModelForCausalLM.from_pretrained(models / "tiny"), models / ADAPTER, 1, targets=["q_proj", "v_proj"])
    (models / ADAPTER / "adapter_model.safetensors").chmod(0o644)  # safetensors writes 0600, and the engine is not root
    image = installed.cluster.add_image("fairlead-vllm", HERE / "images" / "Containerfile.vllm", [])
    engines = Engines(installed, image)
    with claim(installed, MODEL_CLAIM, models), claim(installed, VLLM_CLAIM, environment.folder), engines.service.deleted_afterwards():
        installed.apply(engines.vllm())
        engines.service.wait_ready(replicas=1, seconds=READY_SECONDS)
        yield engines


def containers(pod: dict[str, Any]) -> set[str]:
    return {one["name"] for kind in ("containers", "initContainers") for one in pod["spec"].get(kind, [])}


def test_the_cached_tokens_of_vllm_are_predicted(engines: Engines) -> None:
    [pod] = engines.service.pods()
    assert containers(pod) == {"agent", "engine"} and is_ready(pod)
    prompt = "Which ships sail from here to the islands? " * 30
    first = engines.service.chat(prompt)
    assert first["finish"] == "length" and first["completion_tokens"] == 16
    again = eventually(lambda: (found := engines.service.chat(prompt))["predicted"] > 0 and found, 30, "a prediction from the index")
    assert again["predicted"] == again["cached"] >= 128, "one block of vLLM's CPU build has 128 tokens"


@pytest.mark.parametrize("model", ["", ADAPTER], ids=["base", "adapter"])
@pytest.mark.parametrize("salt", ["", "alice"], ids=["shared", "salted"])
def test_caches_of_adapters_and_salts_are_apart(engines: Engines, model: str, salt: str) -> None:
    """The index knows what vLLM knows: one prompt has four caches."""
    prompt = "How many boxes does the other ship carry? " * 30
    first = engines.service.chat(prompt, model=model, salt=salt)
    assert first["predicted"] == first["cached"] == 0

    def again() -> Any:
        found = engines.service.chat(prompt, model=model, salt=salt)
        return found["predicted"] > 0 and found

    found = eventually(again, 30, "a prediction from the index")
    assert found["predicted"] == found["cached"] >= 128


def test_new_arguments_roll_out_under_load(engines: Engines) -> None:
    with Load(engines.service, concurrency=2, max_tokens=96) as load, Availability(engines.service) as seen:
        engines.apply(engines.vllm(maxNumSeqs=48))
    load.assert_answered()
    assert len(load.outcome["pods"]) == 2, "both revisions served"
    assert seen.fewest == 1, "the new pod is ready before the old one ends"


def test_kill_9_of_vllm_fails_only_its_own_streams(engines: Engines) -> None:
    service = engines.service
    service.scale(2)
    service.wait_ready(replicas=2, seconds=READY_SECONDS)
    victim = service.pods()[0]["metadata"]["name"]
    with Load(service, concurrency=4, max_tokens=128) as load:
        kill = ["exec", "-n", service.system.models, victim, "-c", "agent", "--", "python", "-c", KILL_BUSY_VLLM]
        assert "killed" in service.system.cluster.kubectl(*kill).stdout
        eventually(lambda: restarts(service, victim) == 1, 120, "the engine's container restarted")
        later = Load(service, concurrency=2)
        with later:
            service.wait_ready(replicas=2, seconds=READY_SECONDS)
    later.assert_answered()
    assert load.outcome["requests"] > 4 >= load.outcome["failed"], load.outcome["failures"]
    for failure in load.outcome["failures"]:
        assert failure["pod"] == victim, failure
    [pod] = [pod for pod in service.pods() if pod["metadata"]["name"] == victim]
    assert [one["restartCount"] for one in pod["status"]["containerStatuses"]] == [0], "the agent ran on"


def test_a_worker_drains_under_load(engines: Engines) -> None:
    with Load(engines.service, concurrency=4, max_tokens=128) as load:
        engines.service.scale(1)
        eventually(lambda: len(engines.service.pods()) == 1, 60, "one worker is deleted")
        eventually(lambda: len(all_pods(engines.service)) == 1, 180, "its streams have ended, and it is gone")
    load.assert_answered()
    assert len(load.outcome["pods"]) == 2, "both workers served"


def test_a_service_changes_its_engine_under_load(engines: Engines) -> None:
    """From vLLM to Fairlead and back."""
    for manifest, names in ((engines.fairlead(), {"worker"}), (engines.vllm(), {"agent", "engine"})):
        with Load(engines.service, concurrency=2, max_tokens=96) as load, Availability(engines.service) as seen:
            engines.apply(manifest)
            eventually(lambda: len(all_pods(engines.service)) == 1, 180, "streams of the old engine have ended: the next go to the new one")
        load.assert_answered()
        [pod] = engines.service.pods()
        assert containers(pod) == names
        assert len(load.outcome["pods"]) == 2, "both engines served"
        assert seen.fewest == 1, "a worker with the new engine is ready before the old one ends"


def restarts(service: Service, pod: str) -> int:
    """Return how often the engine's container was restarted."""
    [status] = service.system.get("pod", pod)["status"]["initContainerStatuses"]
    return int(status["restartCount"])


def all_pods(service: Service) -> list[dict[str, Any]]:
    """Return the workers' pods, including those that are being deleted."""
    selector = f"app.kubernetes.io/instance={service.name},app.kubernetes.io/component=worker"
    return list(service.system.get("pods", "-l", selector)["items"])
