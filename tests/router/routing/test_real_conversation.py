"""A conversation with a trained model over a router and two workers: what the router predicts is what the engine finds in its cache.

The answers are real texts: the next turn's prompt has their tokens, also those at the seams of the template, or the prediction fails.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.real_models import SMOLLM2, real_folder
from tests.servers.redis_server import RedisServer
from tests.system.processes import NAMESPACE, Fleet, engine_worker, until

BLOCK = 64
TALKS = {
    "You are a patient teacher of geography who answers in one or two short sentences.": (
        "What is the capital of France?",
        "Which river flows through it?",
        "And what is the capital of Italy?",
    ),
    "You are a cook with a small kitchen, and you answer in plain words, in one or two short sentences.": (
        "What do I need for pancakes?",
        "How long do they take in the pan?",
        "What goes well with them?",
    ),
}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    model = real_folder(SMOLLM2)
    with RedisServer() as redis:
        fleet = Fleet(tmp_path, workers=0, routers=1, redis=redis.url)
        for pod in ("first", "second"):
            settings = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE}
            fleet.add_process(pod, *engine_worker(tmp_path, model, pod, "--block-tokens", str(BLOCK), **settings))
        with fleet:
            yield fleet


class Client:
    """A client of the router that asks what it predicts before it sends a turn."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def predict(self, body: dict[str, Any]) -> dict[str, int]:
        """Return the cached tokens that the router expects at each pod."""
        score = self._http.post("/fairlead/score", json=body)
        assert score.status_code == 200, score.text
        return {worker["pod"]: worker["cached_tokens"] for worker in score.json()["workers"]}

    def predicted_total(self) -> float:
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("fairlead_router_predicted_cached_tokens_total"))

    def ask(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the pod that answered, and the answer."""
        answer = self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-fairlead-pod"], answer.json()


def test_the_predicted_cached_tokens_are_those_of_the_engine(fleet: Fleet) -> None:
    (url,) = fleet.routers
    client = Client(url)
    talks = {system: [{"role": "system", "content": system}] for system in TALKS}
    pods: dict[str, str] = {}
    held = dict.fromkeys(TALKS, 0)
    for turn in range(3):
        for system, questions in TALKS.items():
            messages = talks[system]
            messages.append({"role": "user", "content": questions[turn]})
            body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 48}
            if turn:
                knows = lambda body=body, system=system: client.predict(body)[pods[system]] >= held[system]  # noqa: E731
                until(knows, "the router knows the blocks of the turn before, its answer included", 20)
            before = client.predicted_total()
            pod, answer = client.ask(body)
            reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            predicted = client.predicted_total() - before
            assert abs(predicted - reported) < BLOCK, (turn, system)
            # A busy machine's workers may look so unequal that a conversation moves. Then its new worker holds what it held before.
            assert reported >= held[system] or pod != pods[system]
            pods[system] = pod
            held[system] = (answer["usage"]["total_tokens"] - 1) // BLOCK * BLOCK  # the last token was never an input
            messages.append(answer["choices"][0]["message"])
    assert all(tokens >= 2 * BLOCK for tokens in held.values()), "long enough to show something"
