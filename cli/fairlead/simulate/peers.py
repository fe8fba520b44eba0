"""Other routers' policies with their defaults, as their documentation describes them, reduced to the choice of a pod.

The models favour them: they see the exact index and current figures without delay, while Fairlead sees reports. Loads that they estimate
(Dynamo's blocks, llm-d's metrics) are exact here. Their pods are vLLM or SGLang with the default order, which is fcfs in both.
"""

import bisect
import random
from collections import OrderedDict
from hashlib import sha1

from fairlead.simulate.fleet import Fleet, InflightRequests, Placement, choose_lowest
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request


class PeerPolicy:
    """Base of the policies: the fleet, the router's own in-flight requests, and a random generator."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        self._fleet, self._inflight, self._draw = fleet, inflight, draw


class RoundRobin(PeerPolicy):
    """Each pod in turn. Each router starts at a random pod."""

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        super().__init__(fleet, inflight, draw)
        self._turn = draw.randrange(len(fleet.pods))

    def choose(self, request: Request) -> Placement:
        self._turn += 1
        return Placement(self._fleet.usable[self._turn % len(self._fleet.usable)])


class Random(PeerPolicy):
    def choose(self, request: Request) -> Placement:
        return Placement(self._draw.choice(self._fleet.usable))


class KubeAiLeastLoad(PeerPolicy):
    """The pod with the fewest requests in flight, as KubeAI's LeastLoad (kubeai.org/concepts/load-balancing)."""

    def choose(self, request: Request) -> Placement:
        return Placement(choose_lowest(self._fleet.usable, self._inflight.count.__getitem__, self._draw))


class BoundedLoad(PeerPolicy):
    """Consistent hashing with bounded loads, KubeAI's PrefixHash: the first pod on the ring that has at most 1.25 times the mean load.

    Each pod has 256 points. The key is the second block of the prompt, because all prompts of the conversation trace share the first.
    """

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        super().__init__(fleet, inflight, draw)
        points = [(_point(f"{number}/{copy}"), number) for number in range(len(fleet.pods)) for copy in range(256)]
        self._ring = sorted(points)

    def choose(self, request: Request) -> Placement:
        loads = {number: self._inflight.count[number] for number in self._fleet.usable}
        most = 1.25 * (sum(loads.values()) + 1) / len(loads)
        start = bisect.bisect(self._ring, (_point(str(list(request.blocks[:2])[-1:])), 0))
        for step in range(len(self._ring)):
            number = self._ring[(start + step) % len(self._ring)][1]
            if number in loads and loads[number] + 1 <= most:
                return Placement(number)
        return Placement(min(loads, key=loads.__getitem__))


def _point(text: str) -> int:
    return int.from_bytes(sha1(text.encode(), usedforsecurity=False).digest()[:8], "big")


class SglangLike(PeerPolicy):
    """cache_aware of sglang-router and its successor SMG (smg docs/concepts/routing/cache-aware.md), with a tree of its own routings.

    It chooses the least loaded pod if loads differ by more than 64 and by half. Otherwise it chooses the longest match of over 0.3 of the
    prompt, or without one the least loaded pod. The tree here evicts like the pods, in its favour: a tree that evicts too little predicts
    worse.
    """

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        super().__init__(fleet, inflight, draw)
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in fleet.pods]

    def choose(self, request: Request) -> Placement:
        number = self._pick(request)
        tree = self._trees[number]
        for block in reversed(request.blocks):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self._fleet.pods[number].model.cache_blocks:
            tree.popitem(last=False)
        return Placement(number)

    def _pick(self, request: Request) -> int:
        usable = self._fleet.usable
        loads = [self._inflight.count[number] for number in usable]
        if not (max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)):
            matched = [self._depth(self._trees[number], request) for number in usable]
            if max(matched) > 0.3 * len(request.blocks):
                return usable[matched.index(max(matched))]
        return choose_lowest(usable, self._inflight.count.__getitem__, self._draw)

    def _depth(self, tree: "OrderedDict[int, None]", request: Request) -> int:
        return next((at for at, block in enumerate(request.blocks) if block not in tree), len(request.blocks))


class DynamoLike(PeerPolicy):
    """Dynamo's KV router (docs.nvidia.com/dynamo, Routing Concepts) at temperature 0: the pod with the lowest cost in blocks.

    The cost is the waiting prefill, including this prompt's uncached part (overlap credit 1), plus the active KV, including this prompt's.
    A router knows only its own requests: sharing them between replicas is off by default.
    """

    def choose(self, request: Request) -> Placement:
        fleet, inflight = self._fleet, self._inflight
        depths = fleet.depths(request.blocks)

        def cost(number: int) -> float:
            prefill = inflight.pending[number] + max(0, request.prompt_tokens - depths[number] * BLOCK_TOKENS)
            active = inflight.active[number]
            return prefill / BLOCK_TOKENS + len(active) + sum(block not in active for block in request.blocks)

        number = choose_lowest(fleet.usable, cost, self._draw)
        return Placement(number, min(depths[number] * BLOCK_TOKENS, request.prompt_tokens - 1))


class LlmdLike(PeerPolicy):
    """llm-d's precise prefix routing (llm-d.ai, guide of that name): the highest score of 3 x prefix + 2 x queue + 2 x free KV.

    Each term is 0 to 1: the cached share of the prompt, the queue's position between the longest (0) and the shortest (1), and the share of
    free KV. Without any hit, the least recently used pod wins a tie (no-hit-lru-scorer). The metrics come from the pods, so every router
    sees the same ones.
    """

    def __init__(self, fleet: Fleet, inflight: InflightRequests, draw: random.Random) -> None:
        super().__init__(fleet, inflight, draw)
        self._used = [0] * len(fleet.pods)
        self._clock = 0

    def choose(self, request: Request) -> Placement:
        fleet, seen = self._fleet, self._fleet.inflight
        depths = fleet.depths(request.blocks)
        queues = {number: len(seen.waiting[number]) for number in fleet.usable}
        longest, low, high = max(depths), min(queues.values()), max(queues.values())
        scores = {}
        for number in fleet.usable:
            depth = depths[number]
            kv = 1 - min(1.0, len(seen.active[number]) / fleet.pods[number].model.cache_blocks)
            queue = (high - queues[number]) / (high - low) if high > low else 1.0
            scores[number] = 3 * depth / max(1, len(request.blocks)) + 2 * queue + 2 * kv
        best = max(scores.values())
        number = min((n for n, score in scores.items() if score == best), key=self._used.__getitem__)
        if not longest:
            self._clock += 1
            self._used[number] = self._clock
        return Placement(number, min(depths[number] * BLOCK_TOKENS, request.prompt_tokens - 1))
