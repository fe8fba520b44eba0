"""Redis credentials of the default installation: Redis requires one, each is limited to one service, and all are rotated under load."""

import json
import time
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.service import Load, Service
from e2e.system import System, eventually

OWN_SECRET = "fairlead-redis-credentials"
FILES = "/etc/fairlead/redis"

RUN_COMMANDS = """
import asyncio, json, sys
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.scripts import key_prefix
from fairlead_index.redis.connection import ReplyError
async def main(url, commands):
    client, replies = RedisClient(RedisAccess(url, "/etc/fairlead/redis"), 5), {}
    for command in json.loads(commands):
        words = [key_prefix(word[1:-1]) + "meta" if word[0] == "{" else word for word in command.split()]
        try:
            replies[command] = str(await client.execute(*words))
        except ReplyError as error:
            replies[command] = error.code
    await client.close()
    print(json.dumps(replies))
asyncio.run(main(*sys.argv[1:]))
"""

LOG_IN = """
import json, socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with context.wrap_socket(socket.create_connection((sys.argv[1], 6379), 5)) as connection:
    certificate = connection.getpeercert(binary_form=True).hex()
    connection.sendall((f"AUTH {sys.argv[2]} {sys.argv[3]}" if len(sys.argv) > 2 else "PING").encode() + b"\\r\\n")
    print(json.dumps({"certificate": certificate, "reply": connection.recv(200).decode()}))
"""


class Redis:
    """The chart's Redis, reached from a client pod and as its administrator."""

    def __init__(self, system: System) -> None:
        self.system = system

    def own_secret(self) -> dict[str, str]:
        found = self.system.get("secret", OWN_SECRET, namespace=self.system.namespace)
        return {key: b64decode(value).decode() for key, value in found["data"].items()}

    def log_in(self, *login: str) -> dict[str, str]:
        """Send AUTH with `login` (PING without one) from a pod without credentials. Return the reply and the server's certificate."""
        out = self.system.in_client("python", "-c", LOG_IN, self.system.redis, *login).stdout
        return json.loads(out.strip().splitlines()[-1])

    def command(self, *words: str) -> str:
        """Run a command as the administrator, and return its output."""
        script = f'REDISCLI_AUTH="$P" redis-cli --user fairlead-operator --tls --cacert {FILES}/ca.crt "$@"'
        pod = ["exec", "-n", self.system.namespace, "deploy/fairlead-redis", "--"]
        password = self.own_secret()["password"]
        return self.system.cluster.kubectl(*pod, "env", f"P={password}", "sh", "-c", script, "-", *words).stdout

    def reconnect_all(self, services: list[Service]) -> None:
        """Close all connections, and wait until workers and routers of `services` have logged in again."""
        self.command("CLIENT", "KILL", "TYPE", "normal")
        wanted = {f"{role}:{one.system.models}/{one.name}" for one in services for role in ("worker", "router")}
        eventually(lambda: all(name in self.command("CLIENT", "LIST") for name in wanted), 60, f"logins of {wanted}")


@pytest.fixture(scope="module")
def services(installed: System) -> Iterator[list[Service]]:
    made = [Service(installed, "mine"), Service(installed, "theirs")]
    with made[0].deleted_afterwards(), made[1].deleted_afterwards():
        installed.apply(*(service.manifest(routing={"replicas": 1}) for service in made))
        for service in made:
            service.wait_ready(replicas=1, seconds=300)
        yield made


def files_of(service: Service, role: str) -> dict[str, str]:
    """Return the username and password that a pod's files contain now."""
    (pod,) = service.pods(role)
    script = f"cat {FILES}/username; echo; cat {FILES}/password"
    words = ["exec", "-n", service.system.models, pod["metadata"]["name"], "--", "sh", "-c", script]
    username, password = service.system.cluster.kubectl(*words).stdout.split()
    return {"username": username, "password": password}


def test_redis_requires_a_password(installed: System, services: list[Service]) -> None:
    redis = Redis(installed)
    assert redis.log_in()["reply"].startswith("-NOAUTH")
    assert redis.log_in("default", "guess")["reply"].startswith("-WRONGPASS")
    (pod,) = installed.get("pods", "-l", "app.kubernetes.io/component=redis", namespace=installed.namespace)["items"]
    assert redis.own_secret()["password"] not in json.dumps(pod)


def test_a_pods_credential_is_limited_to_its_service_and_role(services: list[Service]) -> None:
    mine, theirs = (f"{{{service.system.models}/{service.name}}}" for service in services)
    allowed = f"EXISTS {mine}"
    others = [f"EXISTS {theirs}", f"HGETALL {theirs}", f"DEL {theirs}", "KEYS *", "ACL LIST", "FLUSHALL", "CONFIG GET *", "SCRIPT FLUSH"]
    for role, also in (("worker", []), ("router", [f"DEL {mine}"])):  # a router does not write what workers do
        (pod,) = services[0].pods(role)
        words = ["exec", "-n", services[0].system.models, pod["metadata"]["name"], "--", "python", "-c", RUN_COMMANDS]
        commands = json.dumps([allowed, *others, *also])
        out = services[0].system.cluster.kubectl(*words, f"rediss://{services[0].system.redis}:6379", commands).stdout
        replies: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        assert replies.pop(allowed) == "1" and set(replies.values()) == {"NOPERM"}, (role, replies)
    mounted = [volume["secret"]["secretName"] for volume in services[0].pods("router")[0]["spec"]["volumes"] if "secret" in volume]
    redis, responses = sorted(mounted)
    assert redis == "mine-redis-router" and responses.startswith("mine-responses-"), "and no other service's"


@pytest.mark.long
def test_every_credential_is_rotated_under_load(installed: System, services: list[Service]) -> None:
    redis, kubectl = Redis(installed), installed.cluster.kubectl
    home = ["-n", installed.namespace]
    roles = [(service, role) for service in services for role in ("worker", "router")]
    before, own, certificate = {(s.name, r): files_of(s, r) for s, r in roles}, redis.own_secret(), redis.log_in()["certificate"]
    started = [pod["status"]["startTime"] for service, role in roles for pod in service.pods(role)]

    with Load(services[0], concurrency=2) as load:
        kubectl("annotate", "secret", OWN_SECRET, "fairlead.dev/rotate=now", *home)
        at = time.monotonic()
        for service, role in roles:
            old = before[service.name, role]
            eventually(lambda s=service, r=role, old=old: files_of(s, r)["password"] != old["password"], 180, f"new {role} password")
        print(f"all pods have their new passwords after {time.monotonic() - at:.0f} s")
        eventually(lambda: redis.log_in()["certificate"] != certificate, 180, "the new certificate")
        print(f"the new certificate is served after {time.monotonic() - at:.0f} s")
        redis.reconnect_all(services)
        assert "+OK" in redis.log_in(*before["mine", "worker"].values())["reply"], "both passwords are accepted meanwhile"

        # All pods have the new files, so the grace period can end now. Another operator process completes the rotation.
        kubectl("set", "env", "deployment/fairlead-operator", "FAIRLEAD_ROTATION_GRACE=0", *home)
        eventually(lambda: not redis.own_secret()["previous-key"], 120, "the previous credentials dropped")
        for service, role in roles:
            old = list(before[service.name, role].values())
            eventually(lambda old=old: "WRONGPASS" in redis.log_in(*old)["reply"], 30, f"the old {role} password refused")
        assert "WRONGPASS" in redis.log_in("fairlead-operator", own["password"])["reply"]
        redis.reconnect_all(services)
    load.assert_answered()
    assert [pod["status"]["startTime"] for service, role in roles for pod in service.pods(role)] == started, "no pod was restarted"
    index = services[0].status()["index"]
    assert (index["state"], index["credentials"]) == ("Available", "PerService"), index


@pytest.mark.long
def test_a_restarted_redis_is_used_again_and_a_lost_secret_is_created_again(installed: System, services: list[Service]) -> None:
    redis, kubectl = Redis(installed), installed.cluster.kubectl
    with Load(services[0], concurrency=2) as load:
        kubectl("delete", "pod", "-n", installed.namespace, "-l", "app.kubernetes.io/component=redis", "--grace-period=0", "--force")
        eventually(lambda: "PONG" in redis.command("PING"), 120, "Redis")
        wanted = [f"{role}:{installed.models}/mine" for role in ("worker", "router")]
        eventually(lambda: all(name in redis.command("CLIENT", "LIST") for name in wanted), 60, "logins at the new server")
        kubectl("delete", "secret", OWN_SECRET, "-n", installed.namespace)
        eventually(lambda: all(name in redis.command("CLIENT", "LIST") for name in wanted), 300, "logins with passwords of a new key")
    load.assert_answered()


@pytest.mark.long
def test_uninstalling_leaves_no_secret_and_a_new_installation_adopts_the_services(installed: System, services: list[Service]) -> None:
    redis = Redis(installed)
    before = redis.own_secret()
    with Load(services[0], concurrency=2) as load:
        installed.cluster.helm("uninstall", "fairlead", "-n", installed.namespace)
        left = ["get", "secret", OWN_SECRET, "-n", installed.namespace, "--ignore-not-found", "-o", "name"]
        eventually(lambda: not installed.cluster.kubectl(*left).stdout, 60, "the operator's own Secret removed with its Deployment")
        installed.install()
        eventually(lambda: redis.own_secret()["key"] != before["key"], 120, "a new key")
        wanted = [f"{role}:{installed.models}/mine" for role in ("worker", "router")]
        eventually(lambda: all(name in redis.command("CLIENT", "LIST") for name in wanted), 180, "logins with passwords of the new key")
    load.assert_answered()
