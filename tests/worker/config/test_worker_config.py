"""Settings from flags and environment variables, and the errors that name them."""

import socket
from pathlib import Path

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
    monkeypatch.setenv("FAIRLEAD_LIMITS", "stored_responses=9")
    config = _config("--port", "1", "--port", "2", "--limits", "max_connections=7")
    assert (config.port, config.page_size, config.kv_pages, config.block_tokens) == (2, 32, 0, 64)
    assert (config.limits.max_connections, config.limits.stored_responses) == (7, 256), "the flag replaces the whole variable"


def test_an_empty_flag_is_empty_and_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_DTYPE", "")
    monkeypatch.setenv("FAIRLEAD_ADMIN_PORT", "")
    monkeypatch.setenv("FAIRLEAD_TRACE_SCHEDULE", "/trace")
    config = _config("--trace-schedule=")
    assert (config.trace_schedule, config.dtype, config.admin_port) == ("", "auto", None)


def test_switches_have_an_opposite() -> None:
    assert _config().enable_mixed_chunk and not _config("--no-enable-mixed-chunk").enable_mixed_chunk
    assert _config("--deterministic").deterministic and _config("--chunked-prefill-size", "-1").chunked_prefill_size == -1


def test_limits_are_json_or_a_list_in_a_flag_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _config("--limits", '{"max_body_bytes": 5, "body_timeout": 0.5}').limits.model_dump(exclude_defaults=True) == {
        "max_body_bytes": 5,
        "body_timeout": 0.5,
    }
    monkeypatch.setenv("FAIRLEAD_LIMITS", "stored_responses=0, load_timeout=1.5")
    limits = _config().limits
    assert (limits.stored_responses, limits.load_timeout, limits.max_connections) == (0, 1.5, 10_000)


def test_speculative_config_has_the_keys_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _config().speculative_config is None
    ngram = _config("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}').speculative_config
    assert ngram is not None and (ngram.method, ngram.num_speculative_tokens, ngram.prompt_lookup_max) == ("ngram", 3, 4)
    monkeypatch.setenv("FAIRLEAD_SPECULATIVE_CONFIG", '{"model": "hf://a/draft", "quantization": "int4"}')
    draft = _config().speculative_config
    assert draft is not None and (draft.method, draft.model, draft.quantization) == ("draft_model", "hf://a/draft", "int4")


def test_adapters_are_given_in_one_flag_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"sql": "hf://a/sql", "tone": "file:///tone"}
    assert _config("--lora-modules", "sql=hf://a/sql", "tone=file:///tone").loras == expected
    assert _config("--lora-modules=sql=hf://a/sql", "--lora-modules=tone=file:///tone").loras == expected
    monkeypatch.setenv("FAIRLEAD_LORA_MODULES", "sql=hf://a/sql,tone=file:///tone")
    assert _config().loras == expected


def test_a_pods_ipv6_address_gets_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The downward API gives it without, and one template serves clusters of both kinds."""

    def advertised(value: str) -> str:
        monkeypatch.setenv("FAIRLEAD_ADVERTISE", value)
        return _config().advertise

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
        (("--port",), "--port: expected one argument"),
        (("--block-tokens", "50"), "--block-tokens 50 is not a multiple of --page-size 16; try --block-tokens 64"),
        (("--model", "ftp://bucket"), "--model 'ftp://bucket': is no folder or file here and no model URI"),
        (("--scheduling-policy", "best"), "--scheduling-policy 'best'"),
        (("--tool-call-parser", "qwen"), "--tool-call-parser 'qwen': is none of auto, none, harmony, hermes"),
        (("--reasoning-parser", "qwen"), "--reasoning-parser 'qwen': is none of auto, none, harmony, think"),
        (("--tool-call-parser", "harmony", "--reasoning-parser", "think"), "harmony is for both"),
        (("--speculative-config", "ngram"), "--speculative-config 'ngram': is no JSON object"),
        (("--speculative-config", "[1]"), "--speculative-config '[1]': is no JSON object"),
        (("--speculative-config", "{}"), "--speculative-config lacks the key 'method'"),
        (("--speculative-config", '{"method": "eagle"}'), "--speculative-config method='eagle': Input should be 'ngram' or 'draft_model'"),
        (("--speculative-config", '{"method": "draft_model"}'), "--speculative-config: method 'draft_model' with model '': give a model"),
        (("--speculative-config", '{"method": "ngram", "model": "hf://a/b"}'), "with method 'draft_model', and only with it"),
        (("--speculative-config", '{"model": "gpt2"}'), "--speculative-config model='gpt2': is no folder or file here and no model URI"),
        (("--speculative-config", '{"method": "ngram", "quantization": "int4"}'), "quantization 'int4' without a model"),
        (("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 6}'), "prompt_lookup_min 6 is more than prompt_lookup_max 5"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 65}'), "num_speculative_tokens=65: "),
        (("--speculative-config", '{"methods": "ngram"}'), "unknown key 'methods' (did you mean 'method'?); the keys are method, model,"),
        (("--limits", "max_body_byte=1"), "--limits: unknown key 'max_body_byte' (did you mean 'max_body_bytes'?); the keys are max_conn"),
        (("--limits", "max_connections=0"), "--limits max_connections='0': Input should be greater than or equal to 1"),
        (("--limits", "max_connections"), "--limits 'max_connections': 'max_connections' is not KEY=VALUE"),
        (("--limits", '{"max_connections": '), "--limits '{\"max_connections\": ': is no JSON object"),
        (("--lora-modules", "sql"), "'sql' is not NAME=URI"),
        (("--redis-url", "redis://r"), "--redis-url is not a flag; set the environment variable FAIRLEAD_REDIS_URL"),
        (("--max-body-bytes", "1"), "--max-body-bytes is not a flag; give --limits max_body_bytes=VALUE"),
        (("--max-num-seq=1",), "--max-num-seq is not a flag; did you mean --max-num-seqs?"),
        (("--policy", "fcfs"), "--policy is not a flag; did you mean --scheduling-policy?"),
        (("--lora", "a=hf://b/c"), "--lora is not a flag; did you mean --lora-modules?"),
        (("--no-such-flag", "1"), "--no-such-flag is not a flag; fairlead-worker --help lists the flags"),
        (("hf://org/other",), "'hf://org/other' is not a flag; give the model as --model hf://org/other"),
    ],
)
def test_bad_flags_are_refused_by_name(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        _config(*arguments)
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1, "one line, without the usage"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"REDIS_URL": "http://r"}, "FAIRLEAD_REDIS_URL 'http://r'"),
        ({"REDIS_URL": "redis://r"}, "FAIRLEAD_REDIS_URL needs FAIRLEAD_INDEX_NAMESPACE too"),
        ({"ADVERTISE": "pod"}, "FAIRLEAD_ADVERTISE 'pod': must be HOST:PORT"),
        ({"ADVERTISE": "10.0.0.7:65536"}, "must be HOST:PORT"),
        ({"PEERS": "pod"}, "FAIRLEAD_PEERS 'pod': FAIRLEAD_PEERS"),
        ({"ADMIN_PORT": "x"}, "FAIRLEAD_ADMIN_PORT 'x'"),
    ],
)
def test_bad_variables_are_refused_by_name(
    variables: dict[str, str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"FAIRLEAD_{name}", value)
    with pytest.raises(SystemExit) as exit:
        _config()
    assert exit.value.code == 2
    assert says in capsys.readouterr().err


def test_the_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        WorkerConfig.from_command_line([])
    assert "--model is missing; give it, or set FAIRLEAD_MODEL" in capsys.readouterr().err


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_REDIS_URL", "redis://user:hunter2@host:1/0")
    monkeypatch.setenv("FAIRLEAD_INDEX_NAMESPACE", "a/b")
    monkeypatch.setenv("FAIRLEAD_NODES_SECRET", "hunter2-hunter2-hunter2")
    config = _config("--tensor-parallel-size=2", "--nnodes=2", "--master-addr=host", "--limits", "stored_responses=9")
    assert "hunter2" not in config.describe()
    assert "FAIRLEAD_REDIS_URL=redis://user:***@host:1/0" in config.describe() and "--limits=stored_responses=9" in config.describe()
    assert redact_url("redis://host/0") == "redis://host/0"


def test_no_password_is_shown_when_the_url_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_REDIS_URL", "http://user:secret@host:1/0")
    with pytest.raises(SystemExit):
        _config()
    printed = capsys.readouterr().err
    assert "secret" not in printed and "http://user:***@host:1/0" in printed


def test_a_model_is_a_folder_or_a_repository_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People type what they see: a folder, or the name on the hub. An existing folder wins."""
    (tmp_path / "my models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert WorkerConfig(model="org/name@v1").model == "hf://org/name@v1"
    assert WorkerConfig(model="my models/tiny").model == f"file://{tmp_path}/my%20models/tiny"
    assert WorkerConfig(model="./none").model == f"file://{tmp_path}/none", "the load then names the folder that is not there"
    monkeypatch.chdir(tmp_path / "my models")
    assert WorkerConfig(model=".").model == f"file://{tmp_path}/my%20models" and WorkerConfig(model=".").names == ("my models",)
    assert WorkerConfig(model="tiny").names == ("tiny",)


def test_names() -> None:
    assert WorkerConfig(model="hf://org/name@main").names == ("org/name",)
    assert WorkerConfig(model="file:///models/tiny").names == ("tiny",)
    assert WorkerConfig(model="file:///models/tiny", served_model_name="a, b").names == ("a", "b")


def test_addresses() -> None:
    assert WorkerConfig(model="file:///m", host="127.0.0.1").address(8000) == "127.0.0.1:8000"
    assert WorkerConfig(model="file:///m", host="::1").address(8000) == "[::1]:8000"
    assert WorkerConfig(model="file:///m", advertise="10.0.0.7:9").address(8000) == "10.0.0.7:9"


def test_the_url_and_the_credentials_of_redis_reach_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"INDEX_NAMESPACE": "a/b", "REDIS_URL": "rediss://r", "REDIS_CREDENTIALS": "/etc/redis"}
    for name, value in variables.items():
        monkeypatch.setenv(f"FAIRLEAD_{name}", value)
    redis = _config().redis
    assert redis is not None and (redis.url, redis.credentials) == ("rediss://r", "/etc/redis")


@pytest.mark.parametrize(
    ("flag", "content", "words"),
    [
        ("--chat-template", b"{% for %}", "does not compile"),
        ("--chat-template", b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
        ("--chat-template", b"\xff", "is no UTF-8 text"),
        ("--chat-template", None, "cannot be read: No such file"),
        ("--api-key-file", b"# none\n", "has no key"),
        ("--api-key-file", b"a key\n", "one key a line"),
        ("--api-key-file", b"k" * (1 << 20) + b"\n", "is larger than"),
    ],
)
def test_a_file_that_cannot_work_is_refused_at_the_start(
    flag: str, content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        _config(flag, str(file))
    assert exit.value.code == 2
    assert (message := capsys.readouterr().err).startswith(f"fairlead-worker: {flag} ") and words in message, message


def test_the_log_level_may_be_in_lower_case() -> None:
    assert _config("--log-level", "debug").log_level == "DEBUG"
