"""`--session-header`: the header that names a session, as ingresses and other routers call it."""

import pytest
from pydantic import ValidationError
from tests.router.harness import Fleet

from fairlead_router.config import RouterConfig


@pytest.mark.parametrize(
    ("header", "sent"), [("x-session-id", "X-Session-Id"), ("x-user-id", "X-User-Id"), ("X-Conversation", "x-conversation")]
)
async def test_requests_of_a_session_go_to_one_worker(fleet: Fleet, header: str, sent: str) -> None:
    workers = [await fleet.worker() for _ in range(4)]
    router = await fleet.router(*workers, policy="Session", session_header=header)
    for session in ("a", "b", "c"):
        pods = set()
        for turn in range(6):
            body = {"model": "stand-in", "prompt": f"{session} {turn}"}
            answer = await router.client.post("/v1/completions", json=body, headers={sent: session})
            assert answer.status_code == 200, answer.text
            pods.add(answer.headers["x-fairlead-pod"])
        assert len(pods) == 1


@pytest.mark.parametrize("wrong", ["", "authorization", "X-Api-Key", "cookie", "x-fairlead-pod", "x y", "content-length"])
def test_a_header_that_the_router_uses_itself_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="such as x-user-id"):
        RouterConfig(workers="static://a:1", session_header=wrong)
