"""vLLM's command line in a container, in every spelling, and the flags that are fields of an InferenceService. Pure."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NotMigratable, reasons, show, whole
from fairlead_operator.api.owned_flags import ENGINE_FLAGS

_SHELLS = ("sh", "bash", "ash", "dash", "zsh")
_BEFORE_COMMANDS = ("exec", "export", "env", "then", "else", "do")
_SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_VARIABLE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
"""A variable as the kubelet or a shell writes it, with a shell's default."""

Carry = Callable[[Draft, list[str], str], None]
"""Carries the values of a flag over, given their source. Raises ValueError where the flag stays in `spec.engine.args`."""


def read_command(draft: Draft, words: Sequence[str], source: str, *, serves: bool = False) -> bool:
    """Read the flags of a command line into the draft; return whether it starts vLLM. `serves`: the image's entrypoint is vLLM."""
    program = words[0].rpartition("/")[2] if words else ""
    option = next((number for number, word in enumerate(words[1:3], 1) if re.fullmatch(r"-[a-z]*c", word)), 0)
    if program in _SHELLS and option:
        return _read_script(draft, " ".join(words[option + 1 : option + 2]), source)
    start = _find_server(words)
    if start is None and not (serves and not program.startswith(("python", "ray"))):
        return False
    read_arguments(draft, words[start or int(program == "serve") :], source)
    return True


def read_arguments(draft: Draft, words: Sequence[Any], source: str) -> None:
    """Read arguments of vLLM's server: `--a=b`, `--a b`, `--a_b`, and the model without a flag."""
    flags: list[tuple[str, list[str]]] = [("--model", [])]
    for word in [part for one in words for part in _expand_word(draft, str(one), source)]:
        if re.match(r"--?[A-Za-z]", word):
            written, assigned, value = word.partition("=")
            flags.append((written, [value] if assigned else []))
        elif word.strip():
            flags[-1][1].append(word)
    named = [(written.lstrip("-").partition(".")[0].replace("_", "-"), written, values, source) for written, values in flags]
    draft.flags += named[not flags[0][1] :]


def _find_server(words: Sequence[str]) -> int | None:
    """Return the place of the first argument of vLLM's server."""
    for number, word in enumerate(words):
        if word.rpartition("/")[2] == "vllm" and words[number + 1 : number + 2] == ["serve"]:
            return number + 2
        if word in _SERVER_MODULES or word.endswith("vllm/entrypoints/openai/api_server.py"):
            return number + 1
    return None


def _read_script(draft: Draft, script: str, source: str) -> bool:
    """Read a shell script: the statement that starts vLLM, and the variables that it sets. Other statements are noted."""
    script = re.sub(r"\s(\d?>>?|&>)\s*(&\d|[^\s;|&]+)", " ", re.sub(r"\\\r?\n", " ", script))  # continued lines, redirections
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    statements: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token and set(token) <= set(";&|\n"):
                statements.append([])
            else:
                statements[-1].append(token)
    except ValueError as error:
        raise NotMigratable(f"{source}: the shell script is not understood ({error}): correct its quotes") from None
    found = False
    for words in statements:
        while words and (words[0] in _BEFORE_COMMANDS or re.match(r"[A-Za-z_]\w*=", words[0])):
            name, assigned, value = words.pop(0).partition("=")
            if assigned:
                draft.env[name] = {"name": name, "value": _expand(draft, value, source)}
        if (start := _find_server(words)) is not None:
            found = True
            read_arguments(draft, words[start:], source)
        elif words and words[0] not in ("set", "fi", "done", "wait", ":") and not words[0].startswith("#"):
            text = words[0] if re.search("token|key|password", " ".join(words), re.IGNORECASE) else " ".join(words)
            draft.note(source, "the script also runs this command, which workers do not: check whether you need it", text)
    return found


def _expand_word(draft: Draft, word: str, source: str) -> list[str]:
    """Return a word of a script with its variables; one that is a variable alone may hold several words."""
    expanded = _expand(draft, word, source)
    return shlex.split(expanded) if re.fullmatch(r"\$\{?\w+\}?", word) and expanded != word else [expanded]


def _expand(draft: Draft, word: str, source: str) -> str:
    """Return a word with the variables whose value the manifest has. `$(NAME)` of another one stays: the kubelet knows it."""

    def value_of(match: re.Match[str]) -> str:
        name, given = match[1] or match[2] or match[4], draft.env.get(match[1] or match[2] or match[4], {})
        if "value" in given:
            return str(given["value"])
        if given or "envFrom" in draft.container:
            return f"$({name})"
        if match[3] is None:
            draft.note(source, "no variable of the container has this name: write its value", match.group())
        return match.group() if match[3] is None else match[3]

    return _VARIABLE.sub(value_of, word)


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
        if name in _DEGREES or name == "lora-modules":
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
    draft.model = (values[0], source)


def _adapters(draft: Draft, values: list[str], source: str) -> None:
    """Read `--lora-modules` in its forms: NAME=PATH and JSON."""
    for value in values:
        named = json.loads(value) if value.startswith("{") else dict(zip(("name", "path"), value.split("=", 1), strict=True))
        draft.adapters.append((named["name"], named["path"], source))


def _download_dir(draft: Draft, values: list[str], source: str) -> None:
    draft.cache_paths += values
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
