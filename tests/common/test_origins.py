"""Which web pages may call admin paths."""

import pytest

from fairlead_common.http.origins import is_foreign, is_foreign_to_admin


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, b"worker.example"),
        (b"http://localhost:8002", b"localhost:8002"),
        (b"http://127.0.0.1:8002", b"127.0.0.1:8002"),
        (b"http://[::1]:8002", b"[::1]:8002"),
        (b"http://LOCALHOST", b"localhost"),
    ],
)
def test_programs_and_pages_at_an_address_may_call_admin_paths(origin: bytes | None, host: bytes) -> None:
    assert not is_foreign_to_admin(origin, host)


@pytest.mark.parametrize(
    "host", [b"rebound.example:8002", b"localhost.evil.example", b"127.0.0.1.evil.example", b"", b"[::1", b"127.0.0.1@evil.example"]
)
def test_a_page_at_a_name_that_its_owner_can_rebind_is_refused(host: bytes) -> None:
    assert is_foreign_to_admin(b"http://" + host, host)
    assert not host or not is_foreign(b"http://" + host, host), "the same origin: only the kind of host tells it apart"


@pytest.mark.parametrize("origin", [b"null", b"", b"https://evil.example", b"http://127.0.0.1:9999"])
def test_a_page_of_another_origin_is_refused(origin: bytes) -> None:
    assert is_foreign_to_admin(origin, b"127.0.0.1:8002")
