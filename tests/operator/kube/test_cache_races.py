"""Lists, watches and responses to writes in any interleaving: once all have arrived, the cache has what the API server has."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_operator.kube.cache import Cache, Read
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import PODS, Kind
from fairlead_operator.kube.reflector import relist

INSTANCE = "app.kubernetes.io/instance"
OWNER = ("n", "qwen")


def pod(name: str, uid: str, version: int, instance: str | None = "qwen") -> dict[str, Any]:
    labels = {} if instance is None else {INSTANCE: instance}
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"version": version}}


class DeletingWhileListed:
    """An API server whose list has two pages. The watch delivers the deletion of the first page's pod before the page is processed."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def pages(self, kind: Kind, namespace: str, *, labelled: bool) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        self._cache.put(pod("a", "ua", 5))
        self._cache.remove(pod("a", "ua", 11))
        yield [pod("a", "ua", 5)], 10
        yield [pod("b", "ub", 6)], 10


async def test_a_pod_that_is_deleted_while_it_is_listed_does_not_come_back() -> None:
    cache = Cache(lambda owner: None)
    result = await relist(cast(Cluster, DeletingWhileListed(cache)), cache, PODS, "")
    assert set(cache.children(OWNER)) == {("Pod", "b")} and result.missed_deletions == 0


def test_the_response_to_a_write_does_not_bring_back_a_deleted_pod() -> None:
    cache = Cache(lambda owner: None)
    cache.put(pod("a", "ua", 5))
    with cache.read() as read:
        cache.remove(pod("a", "ua", 7))
        read.put(pod("a", "ua", 6))
        assert not cache.children(OWNER)
        read.put(pod("a", "ua", 8))  # its label was removed and added again: only the watch's selector lost it
    assert cache.children(OWNER)


def test_an_object_that_a_request_found_missing_leaves_its_successor() -> None:
    cache = Cache(lambda owner: None)
    cache.put(pod("a", "new", 9))
    cache.remove_missing(pod("a", "old", 5))
    assert cache.children(OWNER)
    cache.remove_missing(pod("a", "new", 5))
    assert not cache.children(OWNER)


class Simulation:
    """A server with objects of three names, one watch with a delay, lists of one object per page, and writes with delayed responses."""

    def __init__(self) -> None:
        self.cache = Cache(lambda owner: None)
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.watch: deque[tuple[str, dict[str, Any]]] = deque()
        self.lists: list[tuple[Any, Read, deque[dict[str, Any]], set[str], int]] = []
        self.responses: list[tuple[Any, Read, dict[str, Any] | None, dict[str, Any]]] = []

    def change(self, name: str, action: str) -> dict[str, Any] | None:
        """Change the object on the server. Returns it as it is now, or None if it does not exist."""
        held = self.objects.get(name)
        self.version += 1
        if action == "delete":
            if held is not None:
                del self.objects[name]
                gone = pod(name, held["metadata"]["uid"], self.version, held["metadata"]["labels"].get(INSTANCE))
                self.watch.append(("DELETED", gone))
            return None
        uid = held["metadata"]["uid"] if held else f"u{self.version}"
        instance = {"write": "qwen", "relabel": "other", "unlabel": None}[action]
        self.objects[name] = body = pod(name, uid, self.version, instance)
        self.watch.append(("MODIFIED" if held else "ADDED", body))
        return body

    def deliver(self) -> None:
        if self.watch:
            event, body = self.watch.popleft()
            (self.cache.remove if event == "DELETED" else self.cache.put)(body)

    def begin_list(self) -> None:
        context = self.cache.read()
        self.lists.append((context, context.__enter__(), deque(self.objects.values()), set(), self.version))

    def next_page(self) -> None:
        if self.lists:
            context, read, rest, present, version = self.lists[0]
            if rest:
                body = rest.popleft()
                present.add(body["metadata"]["uid"])
                read.put(body)
            else:
                context.__exit__(None, None, None)
                self.cache.retain(PODS, present, version)
                self.lists.pop(0)

    def write(self, name: str) -> None:
        """Write the object if it exists. A response without an object says that the one in the cache does not exist."""
        held = self.cache.child(OWNER, ("Pod", name))
        if held is None:
            return
        context = self.cache.read()
        read = context.__enter__()
        live = self.objects.get(name)
        if live is not None and live["metadata"]["uid"] == held["metadata"]["uid"]:
            self.responses.append((context, read, self.change(name, "write"), held))
        elif live is None:
            self.responses.append((context, read, None, dict(held)))
        else:
            context.__exit__(None, None, None)

    def respond(self) -> None:
        if self.responses:
            context, read, body, held = self.responses.pop(0)
            if body is None:
                self.cache.remove_missing(held)
            else:
                read.put(body)
            context.__exit__(None, None, None)

    def settle(self) -> None:
        while self.responses:
            self.respond()
        while self.watch:
            self.deliver()
        while self.lists:
            self.next_page()


NAMES = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("change"), NAMES, st.sampled_from(["write", "write", "delete", "relabel", "unlabel"])),
    st.tuples(st.just("write"), NAMES),
    st.tuples(st.sampled_from(["deliver", "begin_list", "next_page", "next_page", "respond"])),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_any_interleaving_ends_with_the_objects_of_the_server(steps: list[tuple[str, ...]]) -> None:
    simulation = Simulation()
    for step, *arguments in steps:
        getattr(simulation, step)(*arguments)
    simulation.settle()
    for instance in ("qwen", "other"):
        expected = {
            ("Pod", name): body["status"]
            for name, body in simulation.objects.items()
            if body["metadata"]["labels"].get(INSTANCE) == instance
        }
        cached = simulation.cache.children(("n", instance))
        assert {key: body["status"] for key, body in cached.items()} == expected


@pytest.mark.parametrize("guarded", [True, False])
def test_the_simulation_finds_the_race_without_the_guard(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guarded:
        monkeypatch.setattr(Read, "put", lambda self, body: self._cache.put(body))
    simulation = Simulation()
    simulation.change("a", "write")
    simulation.deliver()
    simulation.begin_list()
    simulation.change("a", "delete")
    simulation.deliver()
    simulation.settle()
    assert bool(simulation.cache.children(OWNER)) is not guarded
