"""vLLM's command line in a container, in every spelling, and the flags that are fields of an InferenceService. Pure."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NotMigratable, show, whole
from fairlead_operator.api.owned_flags import ENGINE_FLAGS

_SHELLS = ("sh", "bash", "ash", "dash", "zsh")
_SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_ABBREVIATED = 7
"""argparse accepts the beginning of a flag; shorter ones could be another flag."""
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_KUBELET_VARIABLE = r"\$\((?P<a>\w+)\)"
_SHELL_VARIABLE = _KUBELET_VARIABLE + r"|\$\{(?P<b>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<c>[A-Za-z_]\w*)"
_PODS = "Fairlead starts and connects the pods of a worker: nothing to do"
_ONE_POD = "each worker is one process group of its own: nothing to do"


def read_command(draft: Draft, words: Sequence[str], source: str, *, serves: bool = False) -> bool:
    """Read the flags of a command line into the draft; return whether it starts vLLM. `serves`: the image's entrypoint is vLLM."""
    words = [str(word) for word in words]
    program = words[0].rpartition("/")[2] if words else ""
    option = next((number for number, word in enumerate(words[1:3], 1) if re.fullmatch(r"-[a-z]*c", word)), 0)
    if program in _SHELLS and option:
        return _read_script(draft, " ".join(words[option + 1 : option + 2]), source)
    start = _find_server(words)
    if start is None and not (serves and (not words or words[0].startswith("-") or not program.startswith(("python", "ray")))):
        return False
    arguments = words[start or 0 :]
    read_arguments(draft, arguments[1:] if start is None and arguments[:1] == ["serve"] else arguments, source)
    return True


def read_arguments(draft: Draft, words: Sequence[Any], source: str) -> None:
    """Read arguments of vLLM's server."""
    _read_flags(draft, [_expand(draft, str(word), source, shell=False) for word in words], source)


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
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise NotMigratable(f"{source}: the shell script is not understood ({error}): correct its quotes") from None
    statements: list[list[str]] = [[]]
    for token in tokens:
        if token and set(token) <= set(";&|\n"):
            statements.append([])
        else:
            statements[-1].append(token)
    found = False
    for statement in statements:
        words = statement[: next((number for number, word in enumerate(statement) if word.startswith("#")), len(statement))]
        while words and (words[0] in ("exec", "export", "env", "then", "else", "do") or re.match(r"[A-Za-z_]\w*=", words[0])):
            name, assigned, value = words.pop(0).partition("=")
            if assigned:
                draft.env[name] = {"name": name, "value": _expand(draft, value, source, shell=True)}
        if words[:1] == ["eval"]:
            words = shlex.split(" ".join(words[1:]))
        start = _find_server(words)
        if start is not None:
            if found:
                draft.note(source, "the script starts vLLM in several places: the flags of all of them were read, check them")
            _read_flags(draft, [part for word in words[start:] for part in _expand_word(draft, word, source)], source)
            found = True
        elif words and words[0] not in ("set", "fi", "done", "wait", ":"):
            text = words[0] if re.search("token|key|password", " ".join(words), re.IGNORECASE) else " ".join(words)
            draft.note(source, "the script also runs this command, which workers do not: check whether you need it", text)
    return found


def _expand_word(draft: Draft, word: str, source: str) -> list[str]:
    """Return a word of a script with its variables; one that is a variable alone may hold several words."""
    expanded = _expand(draft, word, source, shell=True)
    return shlex.split(expanded) if re.fullmatch(r"\$\{?\w+\}?", word) and expanded != word else [expanded]


def _expand(draft: Draft, word: str, source: str, *, shell: bool) -> str:
    """Return a word with the variables whose value the manifest has. `$(NAME)` of another one stays: the kubelet knows it."""

    def value_of(match: re.Match[str]) -> str:
        groups = match.groupdict()
        name, default = next(groups[key] for key in "abc" if groups.get(key)), groups.get("default")
        given = draft.env.get(name, {})
        if "value" in given:
            return str(given["value"])
        if given or "envFrom" in draft.container:
            return f"$({name})"
        if default is None:
            draft.note(source, "no variable of the container has this name: write its value", match.group())
        return match.group() if default is None else default

    return re.sub(_SHELL_VARIABLE if shell else _KUBELET_VARIABLE, value_of, word)


def _read_flags(draft: Draft, words: Sequence[str], source: str) -> None:
    """Add the flags of a command line to the draft: `--a=b`, `--a b`, `--a_b`, and the model without a flag."""
    flags: list[tuple[str, list[str]]] = [("model", [])]
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            written, equals, value = word.partition("=")
            flags.append((written, [value] if equals else []))
        elif word.strip():
            flags[-1][1].append(word)
    for written, values in flags:
        if written != "model" or values:
            draft.flags.append((_full_name(written), written if written != "model" else "--model", values, source))


def _full_name(written: str) -> str:
    """Return the name of a flag: of `--Max_Model_Len`'s spellings, of a unique beginning, and without `.key` of a JSON value."""
    name = written.lstrip("-").partition(".")[0].replace("_", "-")
    known = {*FLAGS, *DROPPED}
    if name in known or len(name) < _ABBREVIATED:
        return name
    longer = [one for one in known if one.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def carry_flags(draft: Draft) -> None:
    """Set the fields that the flags stand for; the others become `spec.engine.args`."""
    args: list[str] = []
    for name, written, values, source in draft.flags:
        where = f"{source} {written}".rstrip()
        if name in DROPPED:
            draft.note(where, DROPPED[name], " ".join(values) or None)
        elif name not in FLAGS or not FLAGS[name](draft, values, where):
            flag = written or f"--{name}"
            args += [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
            draft.origins["engine.args"] = source
    if args:
        draft.spec.setdefault("engine", {})["args"] = args


def _field(target: str, convert: Callable[[str], Any]) -> Callable[[Draft, list[str], str], bool]:
    """Return what carries a flag's value over to a field; a value that the field lacks leaves the flag in `args`."""

    def carry(draft: Draft, values: list[str], source: str) -> bool:
        try:
            converted = convert(values[-1])
        except (ValueError, KeyError, IndexError):
            return False
        if converted is not None:
            draft.put(target, converted, source)
        return True

    return carry


def _size(text: str) -> int:
    """Return a number of tokens as vLLM reads it: 32k is 32000, 32K is 32768. Raises ValueError for auto and -1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise ValueError(text)
    return round(float(match.group(1)) * _SUFFIXES.get(match.group(2), 1))


def _number(name: str) -> Callable[[Draft, list[str], str], bool]:
    """Return what keeps the degree of a parallelism for `fairlead.migrate.finish`."""

    def carry(draft: Draft, values: list[str], source: str) -> bool:
        try:
            draft.parallel[name] = (whole(values[-1]), source)
        except (ValueError, IndexError):
            raise NotMigratable(f"{source}: {show(' '.join(values))} is not a number: correct it") from None
        return True

    return carry


def _served(draft: Draft, values: list[str], source: str) -> bool:
    draft.served_name = values[0] if values else ""
    draft.origins["model.name"] = source
    if len(values) > 1:
        draft.note(source, f"a model has one name, {values[0]}; change clients that send another", values[1:])
    return True


def _model(draft: Draft, values: list[str], source: str) -> bool:
    if values:
        draft.model, draft.model_source = values[0], source
    if len(values) > 1:
        draft.note(source, "only the first is a model: check the command line", values[1:])
    return True


def _chunked(draft: Draft, values: list[str], source: str) -> bool:
    if values and values[0].lower() in ("false", "0"):
        draft.put("engine.chunkedPrefill", "Disabled", source)
    return True


def _adapters(draft: Draft, values: list[str], source: str) -> bool:
    """Read `--lora-modules` in its forms: NAME=PATH and JSON."""
    for value in values:
        try:
            named = json.loads(value) if value.startswith("{") else dict(zip(("name", "path"), value.split("=", 1), strict=True))
            draft.adapters.append((named["name"], named["path"], source))
        except (ValueError, KeyError):
            raise NotMigratable(f"{source}: {show(value)} is not NAME=PATH: correct it") from None
    return True


def _kv_transfer(draft: Draft, values: list[str], source: str) -> bool:
    """Drop connectors between prefill and decode pods; those of caches stay."""
    text = values[0] if values else ""
    if not draft.splits_prefill and '"kv_both"' in text.replace(" ", "") and not re.search("Nixl|P2p|Mooncake", text):
        draft.note(source, "the prefix index does not follow blocks outside the engine's own cache")
        return False
    draft.note(source, "a worker computes both prefill and decode, so no KV cache is transferred: nothing to do", text)
    return True


def _download_dir(draft: Draft, values: list[str], source: str) -> bool:
    draft.cache_paths += values
    draft.note(source, "the operator sets the path; spec.model.cache is the volume: nothing to do", " ".join(values))
    return True


def _config(draft: Draft, values: list[str], source: str) -> bool:
    draft.note(source, "the file must set no flag that a field of spec sets, such as the model or the port: check it", " ".join(values))
    return False


FLAGS: Mapping[str, Callable[[Draft, list[str], str], bool]] = {
    "model": _model,
    "model-tag": _model,
    "revision": _field("model.revision", str),
    "served-model-name": _served,
    "tensor-parallel-size": _number("tensor"),
    "tp": _number("tensor"),
    "pipeline-parallel-size": _number("pipeline"),
    "pp": _number("pipeline"),
    "data-parallel-size": _number("data"),
    "dp": _number("data"),
    "max-model-len": _field("engine.maxModelLen", _size),
    "max-num-seqs": _field("engine.maxNumSeqs", _size),
    "max-num-batched-tokens": _field("engine.maxPrefillTokens", _size),
    "dtype": _field(
        "engine.dtype",
        {
            "auto": None,
            "bfloat16": "BFloat16",
            "half": "Float16",
            "float16": "Float16",
            "float": "Float32",
            "float32": "Float32",
        }.__getitem__,
    ),
    "kv-cache-dtype": _field("engine.kvCache.dtype", {"auto": None, "fp8": "FP8", "fp8_e4m3": "FP8"}.__getitem__),
    "enable-chunked-prefill": _chunked,
    "no-enable-chunked-prefill": lambda draft, values, source: _chunked(draft, ["false"], source),
    "lora-modules": _adapters,
    "download-dir": _download_dir,
    "config": _config,
    "kv-transfer-config": _kv_transfer,
}
"""Flag → what carries it over and returns whether it did. What is not carried over stays in `spec.engine.args`."""

DROPPED: Mapping[str, str] = {
    **{name: text.removeprefix("remove it: ") for name, text in ENGINE_FLAGS["VLLM"].items() if name not in FLAGS},
    **dict.fromkeys(
        ("ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "enable-ssl-refresh"), "set spec.router.tls, TLS of the clients' port"
    ),
    **dict.fromkeys(("data-parallel-address", "data-parallel-rpc-port", "data-parallel-backend", "data-parallel-size-local"), _ONE_POD),
    **dict.fromkeys(("data-parallel-start-rank", "data-parallel-rank", "data-parallel-hybrid-lb", "data-parallel-external-lb"), _ONE_POD),
    **dict.fromkeys(("dpl", "dpa", "dpr", "dpn", "api-server-count"), _ONE_POD),
    **dict.fromkeys(("headless", "master-port", "nnodes", "node-rank", "master-addr", "distributed-executor-backend"), _PODS),
    "hf-token": "put the token into a Secret and name it in spec.model.secretRef",
}
"""Flags that no worker may have, and why."""
