"""Heads that parsers accept and RFC 9112 does not."""

import pytest

from fairlead_common.http.head import SINGLE, find_fault

HOST = (b"host", b"x")


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0"])
def test_only_two_versions_are_known(version: str) -> None:
    assert find_fault(version, [HOST]) == f"HTTP/{version} is not supported here: use HTTP/1.1."


def test_a_request_has_one_host() -> None:
    assert not find_fault("1.1", [HOST]) and not find_fault("1.0", [])
    assert "needs a Host header" in find_fault("1.1", [])
    for value in (b"", b"example.com", b"[::1]:80", b"a_b:1"):
        assert not find_fault("1.1", [(b"host", value)]), value
    for value in (b"a b", b"a/b", b"a,b", b"user@a", b"a\\b"):
        assert "no HOST" in find_fault("1.1", [(b"host", value)]), value


@pytest.mark.parametrize("name", sorted(SINGLE))
def test_headers_of_which_the_last_would_win_come_once(name: bytes) -> None:
    once = [HOST, (b"x-other", b"1"), (b"x-other", b"2"), *([(name, b"x")] if name != b"host" else [])]
    assert not find_fault("1.1", once)
    assert find_fault("1.1", [*once, (name, b"x")]) == f"The request has two {name.decode()} headers: send one."
