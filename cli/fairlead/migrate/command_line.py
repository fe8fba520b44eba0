"""vLLM's command line, in every spelling, and the flags that are fields of an InferenceService. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NotMigratable, reasons, show, whole
from fairlead_operator.api.owned_flags import ENGINE_FLAGS

_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

Carry = Callable[[Draft, list[str], str], None]
"""Carries the values of a flag over, given their source. Raises ValueError where the flag stays in `spec.engine.args`."""


def find_server(words: Sequence[str]) -> tuple[int, int]:
    """Return the places of the program that starts vLLM's server, and of its first argument; -1: none does."""
    for number, word in enumerate(words):
        start = number + 1
        if (word.rpartition("/")[2] == "vllm" or re.search(r"\bvllm[./]entrypoints[./]cli[./]main(\.py)?$", word)) and words[start:][
            :1
        ] == ["serve"]:
            start += 1
        elif not re.search(r"\bvllm[./]entrypoints[./](openai[./])?api_server(\.py)?$", word):
            continue
        program = number
        while program and words[program - 1].startswith("-"):
            program -= 1
        return program - int(program > 0 and _PYTHON.fullmatch(words[program - 1]) is not None), start
    return -1, 0


def are_arguments(words: Sequence[str]) -> bool:
    """Return whether a container's `args` are those of vLLM, which the image starts, and no command."""
    is_model = bool(words) and re.fullmatch(r"[\w.-]*/[\w./-]+", words[0]) is not None and not re.search(r"/bin/|\.(sh|py)$", words[0])
    return not words or words[0] == "serve" or words[0].startswith("-") or is_model


def read_arguments(draft: Draft, words: Sequence[str], source: str) -> None:
    """Read arguments of vLLM's server: `--a=b`, `--a b`, `--a_b`, and the model without a flag, which vLLM prefers."""
    flags: list[tuple[str, list[str]]] = [("--model", [])]
    for word in [draft.expand(one) for one in words]:
        if re.match(r"--?[A-Za-z]", word):
            written, assigned, value = word.partition("=")
            flags.append((written, [value] if assigned else []))
        elif word.strip() or (flags[1:] and not flags[-1][1]):
            flags[-1][1].append(word)
    named = [(written.lstrip("-").partition(".")[0].replace("_", "-"), written, values, source) for written, values in flags]
    draft.flags += [*named[1:], *named[: bool(flags[0][1])]]


def carry_flags(draft: Draft) -> None:
    """Set the fields that the flags stand for; the others become `spec.engine.args`."""
    args: list[str] = []
    for name, written, values, source in draft.flags:
        where = f"{source} {written}".rstrip()
        if name in DROPPED:
            draft.note(where, DROPPED[name], " ".join(values) or None)
        elif not _carry(draft, name, values, where):
            flag = written or f"--{name}"
            args += [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
            draft.origins["engine.args"] = source
    if args:
        draft.spec.setdefault("engine", {})["args"] = args


def _carry(draft: Draft, name: str, values: list[str], source: str) -> bool:
    """Return whether a flag was carried over. A value that the field lacks leaves the flag in `args`."""
    try:
        if name in FLAGS:
            FLAGS[name](draft, values, source)
        return name in FLAGS
    except NotMigratable:
        raise
    except (ValueError, KeyError, IndexError):
        if name in _DEGREES or name in ("lora-modules", "model"):
            raise NotMigratable(f"{source}: {show(' '.join(values))} is not understood: correct it") from None
        return False


def _field(target: str, convert: Callable[[str], Any]) -> Carry:
    """Return what carries a flag's value over to a field; None needs no field."""

    def carry(draft: Draft, values: list[str], source: str) -> None:
        if (converted := convert(values[-1] if values else "true")) is not None:
            draft.put(target, converted, source)

    return carry


def _size(text: str) -> int:
    """Return a number of tokens as vLLM reads it: 32k is 32000, 32K is 32768. Raises ValueError for auto and -1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise ValueError(text)
    return round(float(match[1]) * _SUFFIXES[match[2]])


def _degree(name: str) -> Carry:
    """Return what keeps the degree of a parallelism for `fairlead.migrate.finish`."""
    return lambda draft, values, source: draft.parallel.update({name: (whole(values[-1]), source)})


def _served(draft: Draft, values: list[str], source: str) -> None:
    draft.served_name, draft.origins["model.name"] = values[0], source
    if len(values) > 1:
        draft.note(source, f"a model has one name, {values[0]}; change clients that send another", values[1:])


def _model(draft: Draft, values: list[str], source: str) -> None:
    (value,) = values
    if draft.model[0] not in ("", value):
        draft.note(draft.model[1], f"{value} is used instead", draft.model[0])
    draft.model = (value, source)


def _adapters(draft: Draft, values: list[str], source: str) -> None:
    """Read `--lora-modules` in its forms: NAME=PATH and JSON."""
    for value in values:
        named = json.loads(value) if value.startswith("{") else dict(zip(("name", "path"), value.split("=", 1), strict=True))
        draft.adapters.append((named["name"], named["path"], source))


def _download_dir(draft: Draft, values: list[str], source: str) -> None:
    draft.cache_paths += [value.rstrip("/") for value in values]
    draft.note(source, "the operator sets the path; spec.model.cache is the volume: nothing to do", " ".join(values))


_DTYPES = {"auto": None, "bfloat16": "BFloat16", "half": "Float16", "float16": "Float16", "float": "Float32", "float32": "Float32"}
_DEGREES = {f"{kind}-parallel-size": kind for kind in ("tensor", "pipeline", "data")} | {"tp": "tensor", "pp": "pipeline", "dp": "data"}
FLAGS: Mapping[str, Carry] = {
    **dict.fromkeys(("model", "model-tag", "model-id"), _model),  # the last is of KServe's server, as the two with `model-` below
    **{name: _degree(kind) for name, kind in _DEGREES.items()},
    **dict.fromkeys(("revision", "model-revision"), _field("model.revision", str)),
    **dict.fromkeys(("served-model-name", "model-name"), _served),
    "max-model-len": _field("engine.maxModelLen", _size),
    "max-num-seqs": _field("engine.maxNumSeqs", _size),
    "max-num-batched-tokens": _field("engine.maxPrefillTokens", _size),
    "dtype": _field("engine.dtype", _DTYPES.__getitem__),
    "kv-cache-dtype": _field("engine.kvCache.dtype", {"auto": None, "fp8": "FP8", "fp8_e4m3": "FP8"}.__getitem__),
    "lora-modules": _adapters,
    "download-dir": _download_dir,
}
"""Flag → what carries it over. Others stay in `spec.engine.args`."""

DROPPED: Mapping[str, str] = {
    **{name: text.removeprefix("remove it: ") for name, text in ENGINE_FLAGS["VLLM"].items() if name not in FLAGS},
    **reasons("flags"),
}
"""Flags that no worker may have, and why."""
