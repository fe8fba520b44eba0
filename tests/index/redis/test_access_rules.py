"""Redis users by role, on real servers: what each role needs works under its rules, and everything else is refused."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.index.redis.test_access import works
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_server import VERSIONS, RedisServer, binary

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.access_rules import (
    CannotManageUsers,
    Role,
    acl_rules,
    delete_user,
    ensure_user,
    list_users,
    load_functions,
    user_name,
)
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.scripts import Scripts, key_prefix, library_name, library_source

A, B = "prod/a*", "prod/b"  # no Kubernetes name has a star, but the rules must hold for any name
ROLES: tuple[Role, ...] = ("worker", "router")


def sha256(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


@pytest.fixture
async def admin(own_server: RedisServer) -> AsyncIterator[RedisClient]:
    client = RedisClient(RedisAccess(own_server.url), 5.0)
    yield client
    await client.close()


def access(server: RedisServer, role: Role, namespace: str, tmp_path: Path) -> RedisAccess:
    folder = tmp_path / f"{role}-{namespace.replace('/', '-')}"
    folder.mkdir(exist_ok=True)
    (folder / "username").write_text(user_name(role, namespace))
    (folder / "password").write_text("current")
    return RedisAccess(server.url, str(folder))


async def test_each_role_may_do_its_work(own_server: RedisServer, admin: RedisClient, tmp_path: Path) -> None:
    for role in ROLES:
        await ensure_user(admin, role, A, [sha256("current"), sha256("previous")])
    own_server.command("ACL", "SETUSER", "default", "off")
    worker, router = (access(own_server, role, A, tmp_path) for role in ROLES)
    await works(worker, A, router)


async def test_a_worker_may_store_responses(own_server: RedisServer, admin: RedisClient, tmp_path: Path) -> None:
    """The calls of `fairlead_worker.api.response_store`, on its service's keys. No router may read."""
    for role in ROLES:
        await ensure_user(admin, role, A, [sha256("current")])
    worker = Scripts(access(own_server, "worker", A, tmp_path), A, timeout=5.0)
    try:
        for number in range(3):  # the second one makes room for the third
            assert await worker.call("store_response", f"{number:032x}", "a" * 32, b"text", 60, 2, 1000, 1000) == [b"OK"]
        key = worker.key(f"answers:r{2:032x}")
        assert await worker.redis.execute("HGET", key, "text") == b"text"
        assert await worker.redis.execute("HGET", worker.key(f"answers:r{0:032x}"), "text") is None
        with signed_in(own_server, "router", A) as router:
            for command in (("HGETALL", key), ("ZRANGE", worker.key("answers:all"), 0, -1), ("DEL", key), ("HSET", key, "text", "x")):
                with pytest.raises(redis.RedisError, match=r"(?i)permission"):
                    router.execute_command(*command)
        assert await worker.call("delete_response", f"{2:032x}") == [b"OK"]
        assert await worker.redis.execute("HGET", key, "text") is None
    finally:
        await worker.close()


@contextlib.contextmanager
def signed_in(server: RedisServer, role: Role, namespace: str):  # type: ignore[no-untyped-def]
    with contextlib.closing(redis.Redis(port=server.port, username=user_name(role, namespace), password="current")) as client:
        yield client


async def test_every_other_command_and_key_is_refused(own_server: RedisServer, admin: RedisClient) -> None:
    for role in ROLES:
        await ensure_user(admin, role, A, [sha256("current")])
    names_own = str(admin_version(own_server)) != "6"
    other, longer = key_prefix(B), key_prefix("prod/abc")  # the second one matches if the star is not escaped
    mine = key_prefix(A)
    for prefix in (other, longer):
        own_server.command("SET", prefix + "k", "secret")
    own_server.command("HSET", mine + "meta", "buckets", 4)
    own_server.command("HSET", mine + "q:tenants", "t", "1")
    everyone = [
        *(("GET", prefix + "k") for prefix in (other, longer)),
        *(("SET", prefix + "k", "1") for prefix in (other, longer)),
        *(("EVAL", f"return redis.call('GET', '{prefix}k')", 0) for prefix in (other, longer)),
        *(("EVAL", f"return redis.call('HSET', '{prefix}live', 'a', 'b')", 0) for prefix in (other, longer)),
        ("XREAD", "STREAMS", other + "log", "0"),
        ("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",), ("FLUSHALL",), ("FLUSHDB",), ("SWAPDB", 0, 1), ("SAVE",), ("SHUTDOWN",),
        ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("DEBUG", "SLEEP", "0"), ("MONITOR",), ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"), ("ACL", "LIST"), ("ACL", "SETUSER", user_name("worker", B), "on"), ("ACL", "WHOAMI"),
        ("SCRIPT", "FLUSH"), ("SCRIPT", "KILL"), ("FUNCTION", "LOAD", "#!lua name=x\n"), ("FUNCTION", "FLUSH"), ("FUNCTION", "LIST"),
        ("FUNCTION", "LOAD", "REPLACE", library_source()), ("FUNCTION", "DELETE", library_name()), ("FUNCTION", "RESTORE", "x"),
        ("MODULE", "LIST"), ("REPLICAOF", "127.0.0.1", "1"), ("MIGRATE", "127.0.0.1", "1", other + "k", "0", "1"), ("DUMP", other + "k"),
        ("RENAME", other + "k", mine + "k"), ("COPY", other + "k", mine + "k"), ("SUBSCRIBE", "x"), ("PUBLISH", "x", "y"),
    ]  # fmt: skip
    worker_only = [("HGETALL", mine + "q:tenants"), ("HSET", mine + "q:tenants", "t", "9"), ("DEL", mine + "q:routers")]
    router_only = [
        ("HSET", mine + key, "k", "v") for key in ("live", "names", "meta", "b\0\0\1")
    ] + [
        ("SET", mine + "leases", "x"), ("SET", mine + "seeds", "x"), ("SET", mine + "w12345678", "x"), ("ZADD", mine + "ring", "1", "a"),
        ("DEL", mine + "meta"), ("XADD", mine + "log", "1-1", "r", "x"), ("EXPIRE", mine + "meta", "1"),
        ("EVAL", f"return redis.call('HSET', '{mine}b\\0\\0\\1', 'a', 'b')", 0), ("INFO",),
    ]  # fmt: skip
    for role, forbidden in (("worker", everyone + worker_only), ("router", everyone + (router_only if names_own else []))):
        with signed_in(own_server, role, A) as client:  # type: ignore[arg-type]
            for command in forbidden:
                with pytest.raises(redis.RedisError, match=r"(?i)permission|can't|unknown|not allowed|ACL failure"):
                    client.execute_command(*command)
    assert own_server.command("GET", other + "k") == b"secret" == own_server.command("GET", longer + "k")


def admin_version(server: RedisServer) -> str:
    return str(server.client().info("server")["redis_version"]).split(".")[0]


async def test_a_service_runs_the_functions_that_an_administrator_loads(
    own_server: RedisServer, admin: RedisClient, tmp_path: Path
) -> None:
    """Without loaded functions the scripts run by EVALSHA: the service's own user may not load functions."""
    await load_functions(admin)  # Redis 6.2 refuses it, which is no error
    for role in ROLES:
        await ensure_user(admin, role, A, [sha256("current")])
    without = Scripts(access(own_server, "worker", A, tmp_path), A, timeout=5.0)
    if admin_version(own_server) != "6":
        await works(access(own_server, "worker", A, tmp_path), A, access(own_server, "router", A, tmp_path))
        assert {"cmdstat_fcall", "cmdstat_evalsha", "cmdstat_eval"} & commands(own_server) == {"cmdstat_fcall"}
        await load_functions(admin)
        assert "cmdstat_function|load" in commands(own_server)
        assert own_server.client().info("commandstats")["cmdstat_function|load"]["calls"] == 1, "it existed"
        own_server.command("FUNCTION", "FLUSH")
    assert await without.call("workers") == []
    assert "cmdstat_eval" in commands(own_server) and without._functions_from > 0
    await load_functions(admin)
    without._functions_from = 0.0  # a minute later
    own_server.command("CONFIG", "RESETSTAT")
    assert await without.call("workers") == []
    assert ("cmdstat_fcall" if admin_version(own_server) != "6" else "cmdstat_evalsha") in commands(own_server)
    await without.close()


def commands(server: RedisServer) -> set[str]:
    return set(server.client().info("commandstats"))


async def test_both_passwords_work_during_a_rotation(own_server: RedisServer, admin: RedisClient) -> None:
    name = await ensure_user(admin, "worker", A, [sha256("one")])
    with contextlib.closing(redis.Redis(port=own_server.port, username=name, password="one", single_connection_client=True)) as old:
        assert old.ping()
        await ensure_user(admin, "worker", A, [sha256("two"), sha256("one")])
        assert old.ping()
        for password in ("one", "two"):
            with contextlib.closing(redis.Redis(port=own_server.port, username=name, password=password)) as client:
                assert client.ping()
        await ensure_user(admin, "worker", A, [sha256("two")])
        assert old.ping(), "an open connection stays"
    refused = redis.Redis(port=own_server.port, username=name, password="one", retry=Retry(NoBackoff(), 0))
    with contextlib.closing(refused), pytest.raises(redis.RedisError):
        refused.ping()


async def test_users_are_listed_and_deleted(own_server: RedisServer, admin: RedisClient, tmp_path: Path) -> None:
    for role in ROLES:
        for namespace in (A, B):
            await ensure_user(admin, role, namespace, [sha256("current")])
    await ensure_user(admin, "worker", A, [sha256("current")], "fairlead:other:")
    assert await list_users(admin) == [
        {user_name(role, each) for role in ROLES for each in (A, B)} | {user_name("worker", A, "fairlead:other:")}
    ]
    await delete_user(admin, user_name("worker", A))
    assert await list_users(admin, "fairlead:worker:") == [{user_name("worker", B)}]
    assert await list_users(admin, "fairlead:other:") == [{user_name("worker", A, "fairlead:other:")}]
    powerless = RedisClient(access(own_server, "router", B, tmp_path), 5.0)
    with pytest.raises(CannotManageUsers, match="ACL SETUSER"):
        await ensure_user(powerless, "worker", A, [sha256("x")])
    await powerless.close()
    for wrong in ([], ["plain"], [sha256("x").upper()]):
        with pytest.raises(ValueError, match="SHA-256"):
            await ensure_user(admin, "worker", A, wrong)


async def test_every_node_of_a_cluster_gets_the_user() -> None:
    version = next(version for version in reversed(VERSIONS) if binary(version))
    with RedisCluster(version) as cluster:
        client = RedisClient(RedisAccess(cluster.url), 5.0)
        await load_functions(client)
        await ensure_user(client, "router", A, [sha256("current")])
        await client.close()
        assert all(node.command("FUNCTION", "LIST", "LIBRARYNAME", library_name()) for node in cluster.nodes)
        assert all(user_name("router", A).encode() in node.command("ACL", "USERS") for node in cluster.nodes)


def test_rules_cover_only_the_services_own_keys() -> None:
    for role in ROLES:
        keys = [rule for rule in acl_rules(role, "prod/a[b]?") if "~" in rule]
        assert all(r"{prod/a\[b\]\?" in rule for rule in keys), keys


def test_a_namespace_with_braces_is_refused() -> None:
    with pytest.raises(ValueError, match="braces"):
        acl_rules("worker", "a{b}")
