"""The chart's own Redis, and others: flags, passwords, TLS, and the server as rendered."""

import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.operator.support.chart import rendered, template
from tests.operator.support.cluster import eventually
from tests.servers.redis_install import launcher
from tests.servers.redis_server import free_port

from fairlead_operator.credentials import certificates


def test_an_external_redis_with_a_secret() -> None:
    made = template("--set", "redis.externalUrl=rediss://r:6379", "--set", "redis.existingSecret=index-redis")
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    flags = {"--redis-credentials=/etc/fairlead/redis", "--credentials-secret=fl-fairlead-redis-credentials"}
    assert flags <= set(spec["containers"][0]["args"]) and "--redis-bundled" not in spec["containers"][0]["args"]
    (volume,) = [one["projected"] for one in spec["volumes"] if one["name"] == "redis"]
    assert volume == {"sources": [{"secret": {"name": "index-redis", "optional": True}}], "defaultMode": 0o440}


def test_the_charts_redis_always_requires_a_password() -> None:
    """With any values, two renderings are equal, so GitOps tools see no change, and none contains a password."""
    assert rendered() == rendered()
    given = "--set=redis.existingSecret=mine,redis.tls.existingSecret=cert"
    for arguments, sources in (
        ((), ["fl-fairlead-redis-credentials"] * 2),
        (("--set=redis.tls.enabled=false",), ["fl-fairlead-redis-credentials"]),
        (("--set=redis.tls.existingSecret=cert",), ["fl-fairlead-redis-credentials", "cert"]),
        ((given,), ["mine", "cert"]),
    ):
        objects = template(*arguments)
        assert not [one for one in objects if one["kind"] == "Secret"]
        made = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Deployment"}
        spec = made["fl-fairlead-redis"]["spec"]["template"]["spec"]
        (volume,) = [one["projected"] for one in spec["volumes"] if one["name"] == "redis"]
        assert [one["secret"]["name"] for one in volume["sources"]] == sources
        assert not [one for one in volume["sources"] if one["secret"].get("optional")], "the pod waits for the password"
        operator = made["fl-fairlead-operator"]["spec"]["template"]["spec"]
        flags = operator["containers"][0]["args"]
        assert {"--redis-bundled", "--deployment=fl-fairlead-operator"} <= set(flags)
        mounted = [
            one["secret"]["name"] for volume in operator["volumes"] if volume["name"] == "redis" for one in volume["projected"]["sources"]
        ]
        assert mounted == [name for name in sources if name in ("mine", "cert")]
        assert ("--redis-credentials=/etc/fairlead/redis" in flags) == bool(mounted)
        (url,) = [flag for flag in flags if flag.startswith("--redis-url=")]
        assert url.startswith("--redis-url=redis://") == (len(sources) == 1)


@pytest.mark.parametrize(
    ("kind", "password", "tls"), [("valkey-8", "plain", True), ("7.0", "odd\"\\&%s `$x` 'word'", True), ("7.0", "plain", False)]
)
def test_the_bundled_redis_starts_as_rendered(tmp_path: Path, kind: str, password: str, tls: bool) -> None:
    """Its very command and probe, with this machine's server: only the administrator may log in, and nothing is evicted."""
    if not launcher(kind).exists():
        pytest.skip(f"no server {kind} on this machine: make redis-servers")
    (spec,) = [
        one["spec"]["template"]["spec"]
        for one in template(f"--set=redis.tls.enabled={str(tls).lower()}")
        if one["kind"] == "Deployment" and "-redis" in one["metadata"]["name"]
    ]
    (container,) = spec["containers"]
    (tmp_path / "bin").mkdir()
    name = kind.partition("-")[0] if "-" in kind else "redis"
    for program in (f"{name}-server", f"{name}-cli"):
        text = launcher(kind).read_text().replace('$(dirname "$0")', str(launcher(kind).parent))
        (tmp_path / "bin" / program).write_text(text.replace(f"/bin/{name}-server", f"/bin/{program}"))
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "password").write_text(f"{password}\n")
    held = certificates.issue("127.0.0.1", datetime.now(UTC))
    for file, pem in (("ca.crt", held.authority), ("tls.crt", held.server), ("tls.key", held.server_key)):
        (tmp_path / file).write_text(pem)
    port = str(free_port())
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def here(words: list[str]) -> list[str]:
        words = [word.replace("/etc/fairlead/redis", str(tmp_path)).replace("/tmp/users", f"{tmp_path}/users") for word in words]
        words = [word.replace(" ping", f" -p {port} ping") for word in words]
        return [port if word == "6379" else str(tmp_path) if word == "/tmp" else word for word in words]

    def healthy() -> bool:
        return subprocess.run(here(container["livenessProbe"]["exec"]["command"]), env=environment, capture_output=True).returncode == 0

    encryption = {"ssl": True, "ssl_ca_certs": str(tmp_path / "ca.crt")} if tls else {}
    options: dict[str, Any] = {"host": "127.0.0.1", "port": int(port), "retry": Retry(NoBackoff(), 0), **encryption}
    with subprocess.Popen(here([*container["command"], *container["args"]]), env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            eventually(healthy)
            assert password not in (tmp_path / "users.conf").read_text()
            with redis.Redis(**options) as anonymous, pytest.raises(redis.AuthenticationError):
                anonymous.ping()
            with redis.Redis(**options, username="fairlead-operator", password=password) as client:
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
                with socket.create_connection(("::1", int(port)), timeout=5):
                    pass  # in a cluster with IPv6 only, a pod has no other address
                client.acl_setuser("fairlead-operator", reset_passwords=True, passwords=["+another"])
            assert not healthy(), "a server that was started with a password that is lost is started again"
        finally:
            server.kill()
