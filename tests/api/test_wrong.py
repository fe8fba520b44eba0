"""A router without workers refuses no request that a worker would accept."""

import random

import httpx
from tests.api.bodies import Bodies
from tests.api.fleet import Pair

from fairlead_router.errors import ApiError
from fairlead_router.request import validation as wrong


def test_a_worker_refuses_all_that_a_router_without_workers_refuses(pair: Pair) -> None:
    bodies = Bodies(pair.worker.client.get("/openapi.json").json(), random.Random(6))
    refused = 0
    with httpx.Client(base_url=pair.worker.url, timeout=60) as client:
        for _ in range(1500):
            path, content = bodies.operation()
            try:
                wrong.check(path, content)
            except ApiError as error:
                refused += 1
                answer = client.post(path, content=content)
                # A worker knows its models, and some paths look for the model before they look at the other fields.
                assert error.status == 400 and answer.status_code in (400, 404), (path, content[:2000], str(error), answer.text)
    assert refused > 300
