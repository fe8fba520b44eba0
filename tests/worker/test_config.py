"""Flags and environment."""

import socket

import pytest

from fairlead_index.redis.access import redact_url
from fairlead_worker.config import WorkerConfig
from fairlead_worker.main import _listen


def _config(*arguments: str) -> WorkerConfig:
    return WorkerConfig.from_command_line(["--model", "hf://org/name", *arguments])


def test_flags_win_over_the_environment_and_the_last_over_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_PORT", "1111")
    monkeypatch.setenv("FAIRLEAD_PAGE_SIZE", "32")
    monkeypatch.setenv("FAIRLEAD_KV_PAGES", "")
    config = _config("--port", "1", "--port", "2")
    assert (config.port, config.page_size, config.kv_pages, config.block_tokens) == (2, 32, 0, 64)


def test_an_empty_flag_is_empty_and_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_DTYPE", "")
    config = WorkerConfig.from_command_line(["--model=file:///m", "--termination-log="])
    assert (config.termination_log, config.dtype) == ("", "auto")


def test_a_pods_ipv6_address_gets_its_brackets() -> None:
    """The downward API gives it without, and one template serves clusters of both kinds."""

    def advertised(value: str) -> str:
        return _config("--advertise", value).advertise

    assert advertised("fd00:10:244::1f:8000") == "[fd00:10:244::1f]:8000"
    assert advertised("[fd00::7]:8000") == "[fd00::7]:8000" and advertised("10.0.0.7:8000") == "10.0.0.7:8000"


def test_every_address_is_listened_on() -> None:
    config = _config("--port", "0")
    with _listen(config.host, config.port) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        if listener.family == socket.AF_INET6:
            with socket.create_connection(("::1", port), timeout=5):
                pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--port", "x"), "--port 'x'"),
        (("--port", "70000"), "--port '70000'"),
        (("--block-tokens", "50"), "--block-tokens 50 is not a multiple of --page-size 16; try --block-tokens 64"),
        (("--model", "gs://bucket"), "--model 'gs://bucket': is no model URI"),
        (("--redis-url", "http://r"), "--redis-url 'http://r'"),
        (("--redis-url", "redis://r"), "--redis-url needs --index-namespace"),
        (("--advertise", "pod"), "--advertise 'pod': must be HOST:PORT"),
        (("--policy", "best"), "--policy 'best'"),
        (("--speculative-method", "eagle"), "--speculative-method 'eagle'"),
        (("--speculative-method", "draft"), "method draft needs a model to draft with"),
        (("--speculative-model", "hf://a/b"), "no other method takes one"),
        (("--speculative-model", "a/b", "--speculative-method", "draft"), "--speculative-model 'a/b': is no model URI"),
        (("--speculative-ngram-min", "6"), "--speculative-ngram-min 6 is more than --speculative-ngram-max 5"),
        (("--tool-call-parser", "qwen"), "--tool-call-parser 'qwen': is none of auto, none, harmony, hermes"),
        (("--reasoning-parser", "qwen"), "--reasoning-parser 'qwen': is none of auto, none, harmony, think"),
        (("--tool-call-parser", "harmony", "--reasoning-parser", "think"), "harmony is for both"),
        (("--speculative-num-tokens", "0"), "--speculative-num-tokens '0'"),
        (("--speculative-num-tokens", "1000000000"), "less than or equal to 64"),
        (("--no-such-flag", "1"), "--no-such-flag"),
    ],
)
def test_bad_values_are_refused_by_name(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        _config(*arguments)
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_the_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        WorkerConfig.from_command_line([])
    assert "--model is missing; give it, or set FAIRLEAD_MODEL" in capsys.readouterr().err


def test_no_password_is_shown() -> None:
    several = ("--tensor-parallel=2", "--nodes=2", "--leader=host", "--nodes-secret=hunter2-hunter2-hunter2")
    config = _config("--redis-url", "redis://user:hunter2@host:1/0", "--index-namespace", "a/b", *several)
    assert "hunter2" not in config.describe()
    assert "redis://user:***@host:1/0" in config.describe()
    assert redact_url("redis://host/0") == "redis://host/0"


def test_no_password_is_shown_when_the_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _config("--redis-url", "http://user:secret@host:1/0")
    said = capsys.readouterr().err
    assert "secret" not in said and "http://user:***@host:1/0" in said


def test_names() -> None:
    assert WorkerConfig(model="hf://org/name@main").names == ("org/name",)
    assert WorkerConfig(model="file:///models/tiny").names == ("tiny",)
    assert WorkerConfig(model="file:///models/tiny", served_model_name="a, b").names == ("a", "b")


def test_addresses() -> None:
    assert WorkerConfig(model="file:///m", host="127.0.0.1").address(8000) == "127.0.0.1:8000"
    assert WorkerConfig(model="file:///m", host="::1").address(8000) == "[::1]:8000"
    assert WorkerConfig(model="file:///m", advertise="10.0.0.7:9").address(8000) == "10.0.0.7:9"


def test_files_for_redis_reach_the_index_and_bad_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--redis-url", "rediss://r", "--index-namespace", "a/b", "--redis-username", "u", "--redis-ca-file", "/ca")
    redis = _config(*asked, "--redis-password-file", "/p").redis
    assert redis is not None and (redis.username, redis.ca_file, redis.password_file) == ("u", "/ca", "/p")
    for more, said in ((("--redis-cert-file", "/c"), "its key"), (("--redis-url", "redis://r"), "rediss://")):
        with pytest.raises(SystemExit):
            _config(*asked, *more)
        assert said in capsys.readouterr().err
