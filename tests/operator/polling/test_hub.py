"""The commit of an hf:// model: asked once for a revision, in the background, and the same in every template of that spec."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.operator.rollout.test_revisions import NOW
from tests.operator.support.manifests import SETTINGS, service
from tests.operator.support.stub_server import StubServer

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import Desired, desired
from fairlead_operator.kube.kinds import REVISIONS
from fairlead_operator.observed import HubModel, ModelCommit, Observed
from fairlead_operator.polling.hub import BACKOFF_FIRST, FRESH, MAX_REQUESTS, HubResolver, HubUnreachable, fetch_commit
from fairlead_operator.revisions import worker_revision
from fairlead_operator.rollout.model_commit import find_commit, find_hub_model, find_unresolved

SHA, OTHER = "a" * 40, "b" * 40
MODEL = HubModel("Qwen/Qwen3-8B", "")


class Hub:
    """Answers as huggingface.co does on /api/models/…, for one model."""

    def __init__(self) -> None:
        self.sha, self.asked, self.tokens = SHA, [], []
        self._server = StubServer(self._answer)
        self.url, self.close = self._server.url, self._server.close

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        self.asked.append(path.partition("?")[0])
        if not path.startswith("/api/models/Qwen/Qwen3-8B"):
            return 404, {"error": "Repository not found"}
        return 200, {"id": "Qwen/Qwen3-8B", "sha": self.sha}


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


async def resolve(resolver: HubResolver, model: HubModel = MODEL) -> ModelCommit:
    """Ask as a reconciler does: again when it is woken."""
    woken = asyncio.Event()
    answer = resolver.commit(model, woken.set)
    if answer is None:
        async with asyncio.timeout(60):
            await woken.wait()
        answer = resolver.commit(model, woken.set)
    assert answer is not None
    return answer


async def test_a_branch_is_resolved_once_for_services_of_one_model(hub: Hub) -> None:
    clock = [0.0]
    resolver = HubResolver(hub.url, clock=lambda: clock[0])
    answers = await asyncio.gather(*(resolve(resolver) for _ in range(20)))
    assert {one.commit for one in answers} == {SHA} and len(hub.asked) == 1
    hub.sha, clock[0] = OTHER, FRESH + 1
    assert (await resolve(resolver)).commit == OTHER, "a later revision gets the present commit"
    assert (await resolve(resolver, replace(MODEL, revision="v1"))).commit == OTHER and hub.asked[-1].endswith("/revision/v1")
    await resolver.close()


async def test_a_hub_that_refuses_is_reported_and_others_are_still_asked(hub: Hub) -> None:
    resolver = HubResolver(hub.url)
    refused = await resolve(resolver, HubModel("Qwen/private", "main", needs_token=True))
    assert refused.commit == "" and "hf://Qwen/private has no commit, and each worker resolves main" in refused.problem
    assert "without the service's token" in refused.problem and "Set spec.model.revision to a commit" in refused.problem
    assert (await resolve(resolver)).commit == SHA
    await resolver.close()


async def test_a_hub_that_cannot_be_reached_delays_one_revision_and_is_then_left_alone(hub: Hub) -> None:
    hub.close()
    clock, asked = [0.0], []

    async def fetch(model: HubModel, endpoint: str) -> str:
        asked.append(model)
        return await fetch_commit(model, endpoint)

    resolver = HubResolver(hub.url, fetch, lambda: clock[0])
    assert "does not answer" in (await resolve(resolver)).problem
    other = HubModel("a/b", "")
    assert resolver.commit(other, lambda: None) is not None, "an answer at once, without a request"
    assert asked == [MODEL]
    clock[0] = BACKOFF_FIRST + 1
    assert (await resolve(resolver, other)).problem and asked == [MODEL, other]
    clock[0] += BACKOFF_FIRST + 1
    assert resolver.commit(HubModel("c/d", ""), lambda: None) is not None, "twice as long after the second failure"
    await resolver.close()


async def test_requests_that_queue_at_an_unreachable_hub_are_one_failure() -> None:
    clock, asked, full = [0.0], [], asyncio.Event()

    async def fetch(model: HubModel, endpoint: str) -> str:
        asked.append(model)
        if len(asked) == MAX_REQUESTS:
            full.set()
        await full.wait()
        raise HubUnreachable("no route")

    resolver = HubResolver("http://hub.example", fetch, lambda: clock[0])
    answers = await asyncio.gather(*(resolve(resolver, HubModel(f"a/{number}", "")) for number in range(200)))
    assert all("does not answer (no route)" in one.problem for one in answers)
    assert len(asked) == MAX_REQUESTS, "those in the queue ask no more"
    clock[0] = BACKOFF_FIRST + 1
    await resolve(resolver)
    assert len(asked) == MAX_REQUESTS + 1, "the pause is that after one failure"
    await resolver.close()


async def test_a_revision_waits_no_longer_than_promised_in_the_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_operator.polling.hub.LONGEST_WAIT", 0.05)
    asked = []

    async def fetch(model: HubModel, endpoint: str) -> str:
        asked.append(model)
        await asyncio.Event().wait()
        return SHA

    resolver = HubResolver("http://hub.example", fetch)
    answers = await asyncio.gather(*(resolve(resolver, HubModel(f"a/{number}", "")) for number in range(MAX_REQUESTS + 1)))
    assert all("has not answered within" in one.problem for one in answers) and len(asked) <= MAX_REQUESTS
    assert resolver.commit(MODEL, lambda: None) is None, "a queue is no reason to leave the hub alone"
    await resolver.close()


@pytest.mark.parametrize("own", [True, False])
async def test_only_the_hub_of_the_chart_is_asked(hub: Hub, own: bool) -> None:
    resolver = HubResolver(f"{hub.url}/" if own else "http://hub.example")
    answer = await resolve(resolver, replace(MODEL, endpoint=hub.url))
    assert (answer.commit == SHA) == own and bool(hub.asked) == own
    if not own:
        assert f"asks only http://hub.example (hub.endpoint of the chart), and the hub of this service is {hub.url}" in answer.problem
    await resolver.close()


async def test_a_redirect_is_not_followed(hub: Hub) -> None:
    redirecting = web.Application()

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"{hub.url}{request.path}"})

    redirecting.router.add_get("/{path:.*}", redirect)
    async with TestServer(redirecting) as server:
        resolver = HubResolver(str(server.make_url("")))
        answer = await resolve(resolver)
        assert f"it redirects to {hub.url}/api/models/Qwen/Qwen3-8B, which the operator does not follow" in answer.problem
        assert not hub.asked
        await resolver.close()


async def test_an_answer_that_is_no_commit_is_put_into_no_template(hub: Hub) -> None:
    hub.sha = "main --trust-remote-code"
    assert "the answer has no commit" in (await resolve(HubResolver(hub.url))).problem


async def test_without_an_endpoint_nothing_is_asked() -> None:
    async def fetch(model: HubModel, endpoint: str) -> str:
        raise AssertionError("asked")

    assert HubResolver("", fetch).commit(MODEL, lambda: None) == ModelCommit()


def of_workers(variable: dict[str, Any]) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "worker", "env": [{"name": "HF_ENDPOINT", **variable}]}]}}}


class Cluster:
    """The ControllerRevisions of one service, as the applier leaves them."""

    def __init__(self) -> None:
        self.revisions: tuple[Any, ...] = ()

    def look(self, one: InferenceService, commit: str = "", problem: str = "", **settings: Any) -> Desired:
        seen = Observed(revisions=self.revisions, model_commit=ModelCommit(commit, problem, find_hub_model(one)))
        plan = desired(one, seen, replace(SETTINGS, **settings), NOW)
        self.revisions = tuple(body for body in plan.objects if body["kind"] == REVISIONS.kind)
        return desired(one, replace(seen, revisions=self.revisions), replace(SETTINGS, **settings), NOW)


def model_of(plan: Desired) -> str:
    (worker,) = [one for one in plan.objects if one["metadata"]["name"] == "qwen-worker" and one["kind"] == "Deployment"]
    return next(arg for arg in worker["spec"]["template"]["spec"]["containers"][0]["args"] if arg.startswith("--model="))


def test_all_workers_of_a_revision_load_the_commit_that_it_was_resolved_to() -> None:
    cluster, one = Cluster(), service()
    first = cluster.look(one, SHA)
    assert model_of(first) == f"--model=hf://Qwen/Qwen3-8B@{SHA}"
    assert first.status.model_commit is not None and first.status.model_commit.commit == SHA
    again = cluster.look(one, OTHER)
    assert model_of(again) == model_of(first), "the branch has moved, and the revision has not"
    assert find_unresolved(one, Observed(revisions=cluster.revisions)) is None, "it is asked no more"
    other_image = service(engine={"image": "worker:9"})
    assert model_of(cluster.look(other_image, OTHER)) == model_of(first), "nor do other images load other weights"
    assert worker_revision(other_image) != worker_revision(one)
    restarted = service(rollout={"restartedAt": "2026-01-01T00:00:00Z"})
    assert find_unresolved(restarted, Observed(revisions=cluster.revisions)) == MODEL
    assert model_of(cluster.look(restarted, OTHER)).endswith(OTHER), "a restart takes up what the branch is now"


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "s3://bucket/llama"},
        {"uri": "pvc://models/llama"},
        {"uri": "hf://a/b"},
        {"uri": "hf://Qwen/Qwen3-8B@v1"},
        {"revision": "v1"},
    ],
)
def test_an_answer_for_one_model_is_used_for_no_other(model: dict[str, Any]) -> None:
    seen = Observed(model_commit=ModelCommit(SHA, model=MODEL))
    assert find_commit(service(), seen) == SHA
    assert find_commit(service(model=model), seen) == ""
    assert SHA not in model_of(desired(service(model=model), seen, SETTINGS, NOW))


def test_a_revision_without_an_answer_behaves_as_before_and_says_so() -> None:
    cluster, one = Cluster(), service(model={"uri": "hf://a/b@main"})
    plan = cluster.look(one, problem="the hub does not answer")
    assert model_of(plan) == "--model=hf://a/b@main"
    assert plan.status.model_commit is not None and plan.status.model_commit.message == "the hub does not answer"
    assert model_of(cluster.look(one, SHA)) == "--model=hf://a/b@main", "its workers stay alike"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"uri": f"hf://a/b@{SHA}"}, None),
        ({"uri": "hf://a/b", "revision": SHA}, None),
        ({"uri": "pvc://models/qwen"}, None),
        ({"uri": "hf://a/b@refs/pr/1"}, HubModel("a/b", "refs/pr/1")),
        ({"uri": "hf://a/b/c/d.Q4_K_M.gguf@v1"}, HubModel("a/b", "v1")),
        ({"uri": "hf://a/b", "revision": "v1", "secretRef": {"name": "hub"}}, HubModel("a/b", "v1", needs_token=True)),
    ],
)
def test_only_branches_and_tags_of_the_hub_are_asked_for(model: dict[str, Any], wanted: HubModel | None) -> None:
    assert find_unresolved(service(model=model), Observed()) == wanted


@pytest.mark.parametrize(
    ("spec", "endpoint"),
    [
        ({"model": {"endpoint": "http://mirror.example"}}, "http://mirror.example"),
        (of_workers({"value": "http://mirror.example"}), "http://mirror.example"),
        (of_workers({"valueFrom": {"configMapKeyRef": {"name": "hub", "key": "url"}}}), "valueFrom"),
        (of_workers({"value": ""}), ""),
    ],
)
def test_a_mirror_of_the_workers_is_seen(spec: dict[str, Any], endpoint: str) -> None:
    found = find_unresolved(service(**spec), Observed())
    assert found is not None and found.endpoint == endpoint
