"""A wrong flag ends the agent with a line that names it."""

import pytest

from fairlead_agent.config import read_config
from fairlead_agent.main import _split


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--model is missing; give it, or set FAIRLEAD_MODEL"),
        (["--model", "m", "--engine-url", "localhost:8100"], "--engine-url 'localhost:8100': must be http://HOST:PORT"),
        (["--model", "m", "--engine-url", "http://h:port"], "--engine-url 'http://h:port': Port could not be cast"),
        (["--model", "m", "--kv-events", "5557"], "--kv-events '5557': must be tcp://HOST:PORT or ipc:///path"),
        (["--model", "m", "--runtime", "trt"], "--runtime 'trt'"),
        (["--model", "m", "--redis-url", "redis://127.0.0.1"], "--redis-url needs --index-namespace too"),
        (["--model", "m", "--advertise", "nowhere"], "--advertise 'nowhere': must be HOST:PORT"),
        (["--model", "m", "--allowed-remotes", "example.com"], "--allowed-remotes 'example.com': 'example.com' is neither SCHEME://HOST"),
        (["--model", "m", "--max-inflight-bytes", "2048"], "--max-inflight-bytes must be at least --max-body-bytes"),
        (["--model", "m", "--no-such-flag", "1"], "no-such-flag"),
    ],
)
def test_wrong_flags(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_config(flags)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_ADMIN_PORT", "")
    monkeypatch.setenv("FAIRLEAD_REDIS_URL", "")
    monkeypatch.setenv("FAIRLEAD_ADVERTISE", "fd00::7:8000")
    config = read_config(["--model", "m", "--port=1", "--port", "2"])
    assert (config.admin_port, config.redis, config.port) == (None, None, 2)
    assert config.address(8000) == "[fd00::7]:8000"


def test_an_empty_flag_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_KV_EVENTS", "tcp://a:1")
    monkeypatch.setenv("FAIRLEAD_ADMIN_PORT", "8002")
    config = read_config(["--model", "m", "--kv-events", "", "--kv-replay=", "--admin-port="])
    assert (config.kv_events, config.kv_replay, config.admin_port) == ("", "", None)


def test_what_follows_two_dashes_is_the_engine_s_command() -> None:
    assert _split(["--model", "m", "--", "vllm", "serve", "--", "x"]) == (["--model", "m"], ["vllm", "serve", "--", "x"])
    assert _split(["--model", "m"]) == (["--model", "m"], [])
