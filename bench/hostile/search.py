"""Search for the request that costs a router the most CPU per KiB: random recipes, and variants of the best ones."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from bench.hostile.connections import Client, Ended
from bench.hostile.inputs import CHAT, COMPLETIONS, RESPONSES, raw, repeat

PLACES: Final = {
    COMPLETIONS: ("prompt", "stop", "logit_bias", "cache_salt", "user", "unknown", "suffix", "guided_choice"),
    CHAT: ("messages", "tools", "response_format", "stop", "chat_template_kwargs", "metadata", "unknown", "documents"),
    RESPONSES: ("input", "instructions", "tools", "metadata", "text"),
    "/v1/messages": ("messages", "system", "tools", "stop_sequences"),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
    "/query": ("token_ids", "cache_salt", "unknown"),
    "/query_by_hash": ("seq_hashes", "block_hashes"),
}
"""Fields of each path that take much input."""
VALUES: Final = (
    *("[]", "{}", "0", "-1", "7777777", "1e9", "null", "true", '""', '"x"', "[[]]", "[0]", '{"a":0}', "9" * 40, "0." + "1" * 30),
    *(
        '{"role":"user","content":""}',
        '{"role":"user","content":[{"type":"text","text":""}]}',
        '{"type":"function","function":{"name":"f"}}',
    ),
    *('{"type":"message","role":"user","content":"x"}', '["x","y"]', '"\\u0041"'),
)
"""Elements of arrays."""
TEXTS: Final = (
    "a",
    " ",
    "! ?",
    "\\n",
    "\\u0041",
    "é",
    "e\u0301",
    "中",
    "\U0001f600",
    "<|im_start|>",
    "{{",
    "a ",
    "1",
    "0x",
    "\u200d",
    "\\ud83d\\ude00",
    "'s",
)
"""Pieces of strings."""
SHAPES: Final = ("array", "text", "keys", "deep", "object", "texts")
SIZES: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
TRIAL_SECONDS, LEAST_REQUESTS, ENOUGH_CPU_SECONDS, KEPT = 0.3, 8, 0.1, 10
ANSWER_SECONDS, IDLE_SECONDS = 30.0, 2.0


@dataclass(frozen=True)
class Recipe:
    """How one request is made."""

    path: str
    place: str
    shape: str
    atom: str
    size: int

    def build(self) -> bytes:
        """Return the request. The size is that of the field's value, bytes."""
        return raw(self.path, f'"max_tokens":1,"max_output_tokens":1,"{self.place}":{self._value()}')

    def _value(self) -> str:
        match self.shape:
            case "array":
                return f"[{repeat(self.atom, self.size)}]"
            case "object":
                return f'{{"a":[{repeat(self.atom, self.size)}],"b":{{}}}}'
            case "keys":
                return "{" + ",".join(f'"{number:x}":{self.atom}' for number in range(self.size // (len(self.atom) + 8))) + "}"
            case "deep":
                depth = min(900, self.size // 2)
                return "[" * depth + repeat(self.atom, self.size) + "]" * depth
            case "texts":
                return f"[{repeat(chr(34) + self.atom + chr(34), self.size)}]"
        return f'"{repeat(self.atom, self.size, separator="")}"'

    def __str__(self) -> str:
        return f"{self.path} {self.place}: {self.shape} of {self.atom!r}"


@dataclass(frozen=True)
class Trial:
    """A measured recipe. `cost`: CPU milliseconds of the router per KiB, beyond those of an almost empty request."""

    cost: float
    kib: float
    status: str
    recipe: Recipe


def draw(chance: random.Random) -> Recipe:
    """Return a random recipe."""
    path = chance.choice(list(PLACES))
    shape = chance.choice(SHAPES)
    atoms = TEXTS if shape in ("text", "texts") else VALUES
    return Recipe(path, chance.choice(PLACES[path]), shape, chance.choice(atoms), chance.choice(SIZES))


def vary(recipe: Recipe, chance: random.Random) -> Recipe:
    """Return a recipe that differs in one part."""
    other = draw(chance)
    match chance.randrange(4):
        case 0:
            return replace(recipe, path=other.path, place=other.place)
        case 1:
            return replace(recipe, place=chance.choice(PLACES[recipe.path]))
        case 2:
            return replace(recipe, size=other.size)
    return replace(recipe, shape=other.shape, atom=other.atom)


def search(port: int, cpu_seconds: Callable[[], float], seconds: float, seed: int) -> list[Trial]:
    """Return the costliest trials, one for each path and place. `cpu_seconds`: returns those of the router until now."""
    return asyncio.run(_search(port, cpu_seconds, seconds, random.Random(seed)))


async def _search(port: int, cpu_seconds: Callable[[], float], seconds: float, chance: random.Random) -> list[Trial]:
    best: dict[tuple[str, str], Trial] = {}
    tried: set[Recipe] = set()
    small = Recipe(COMPLETIONS, "unknown", "text", "a", 1)
    idle = await _idle_share(cpu_seconds)
    seconds_each, _ = await _measure(small, port, cpu_seconds, idle)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        leaders = sorted(best.values(), key=lambda trial: -trial.cost)[:KEPT]
        recipe = vary(chance.choice(leaders).recipe, chance) if leaders and chance.random() < 0.6 else draw(chance)
        if recipe in tried:
            continue
        tried.add(recipe)
        used, status = await _measure(recipe, port, cpu_seconds, idle)
        kib = len(recipe.build()) / 1024
        trial = Trial(1e3 * max(0.0, used - seconds_each) / kib, kib, status, recipe)
        key = (recipe.path, recipe.place)
        if key not in best or trial.cost > best[key].cost:
            best[key] = trial
    return sorted(best.values(), key=lambda trial: -trial.cost)


async def _idle_share(cpu_seconds: Callable[[], float]) -> float:
    """Return the share of a core that the router uses without requests."""
    began, before = time.monotonic(), cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds() - before) / (time.monotonic() - began)


async def _measure(recipe: Recipe, port: int, cpu_seconds: Callable[[], float], idle: float) -> tuple[float, str]:
    """Return the CPU seconds of the router for one request, and the status. Enough are sent for a clock of 10 ms."""
    began = time.monotonic()
    request, client, count, status = recipe.build(), Client(port), 0, ""
    before, ends, used = cpu_seconds(), time.monotonic() + TRIAL_SECONDS, 0.0
    while time.monotonic() < ends or (count < LEAST_REQUESTS and used < ENOUGH_CPU_SECONDS):
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status = str((await client.ask(request))[0])
        except (Ended, OSError, TimeoutError) as error:
            client.close()
            status = type(error).__name__
        count += 1
        used = cpu_seconds() - before
    client.close()
    return (used - idle * (time.monotonic() - began)) / count, status
