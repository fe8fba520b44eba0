"""The prompt format of the engine's model, from the tokenizer's files, checked against the engine's own tokenization."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import snapshot_download

from fairlead_common.errors import PromptError
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat, digest

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLE_TEXT = "Zürich, 1 + 1 = 2:\n\n\tdef f(x): return x  # 你好 🙂"
TEXT_SAMPLE, CHAT_SAMPLE = "text", "chat"
SAMPLE_CHAT = (
    [{"role": "user", "content": "Hello."}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": SAMPLE_TEXT},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ],
)
"""Prompts whose tokens are compared with the engine's."""


class NoFormat(Exception):
    """The files do not give the engine's tokens. The message says why; routers then send text."""


def find_folder(model: str) -> Path:
    """Return the folder with the tokenizer's files. Raises NoFormat.

    For a model of the hub, the files come from its cache or are downloaded: some megabytes.
    """
    path = Path(model.removeprefix("file://"))
    if path.is_dir():
        return path
    if model.startswith(("file://", "/", ".")):
        raise NoFormat(f"there is no folder {path}: mount the engine's model into the agent's container too")
    name, _, revision = model.removeprefix("hf://").partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's library raises many types
        raise NoFormat(f"the tokenizer of {model} cannot be downloaded: {error}") from error


def read_format(folder: Path, runtime: str, names: list[str], block_tokens: int, max_model_len: int, uri: str) -> PromptFormat:
    """Return the format from a model's files. Raises NoFormat."""
    try:
        text = (folder / "tokenizer.json").read_text()
    except OSError as error:
        raise NoFormat(f"{folder} has no tokenizer.json that can be read ({error.strerror}), only fast tokenizers have one") from error
    config = _read_json(folder / "tokenizer_config.json")
    template, tool_template = _templates(folder, config)
    specials = _read_json(folder / "special_tokens_map.json") | config
    # KV is not shared between engines, and two of them may render one prompt differently: each has its own roots.
    weights = digest(runtime + (folder / "config.json").read_text()) if (folder / "config.json").exists() else digest(runtime + uri)
    return PromptFormat(
        tokenizer_json=text,
        tokenizer_digest=digest(text),
        model_digest=weights,
        model_names=names,
        block_tokens=block_tokens,
        max_model_len=max_model_len,
        chat_template=template,
        tool_template=tool_template,
        model_uri=uri,
        special_tokens={name: value for name in _SPECIAL if (value := _content(specials.get(name)))},
    )


class TokenDifference(msgspec.Struct, frozen=True):
    """A sample whose tokens differ."""

    what: str
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(self.ours, self.theirs, strict=False)) if a != b), min(len(self.ours), len(self.theirs))
        )
        return f"{self.what}: {len(self.ours)} tokens from the files, {len(self.theirs)} from the engine, different from token {at} on"


def samples(format: PromptFormat) -> list[tuple[dict[str, Any], str, list[int]]]:
    """Return (body for the engine's /tokenize, what it is, our tokens) for each sample. Raises NoFormat."""
    model = format.model_names[0]
    try:
        encoder = PromptEncoder(format)
        text = encoder.encode_text(SAMPLE_TEXT).tolist()
    except PromptError as error:
        raise NoFormat(f"the tokenizer's files cannot be used: {error}") from error
    found: list[tuple[dict[str, Any], str, list[int]]] = [({"model": model, "prompt": SAMPLE_TEXT}, TEXT_SAMPLE, text)]
    for messages in SAMPLE_CHAT if format.chat_template else ():
        with contextlib.suppress(PromptError):  # some templates refuse system messages
            tokens = encoder.encode_chat(messages).tolist()
            found.append(({"model": model, "messages": messages, "add_generation_prompt": True}, CHAT_SAMPLE, tokens))
    return found


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Return the chat template, and that for requests with tools if it is another."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(), ""
    given = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template") or ""
    if isinstance(given, str):
        return given, ""
    named = {one["name"]: one["template"] for one in given}
    return named.get("default", ""), named.get("tool_use", "")


def _content(token: Any) -> str:
    return str(token.get("content") or "") if isinstance(token, dict) else token if isinstance(token, str) else ""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise NoFormat(f"{file} is not a JSON object: {error}") from error
