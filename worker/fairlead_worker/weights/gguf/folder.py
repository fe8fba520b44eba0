"""The ordinary files of a model beside a link to its GGUF file, so that all that reads models reads this one too.

They are written once, into the cache: 0.2 s for a vocabulary of 49,152, and 2.5 s for Gemma's of 262,144.
"""

import json
import os
import shutil
import tempfile
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import xxhash

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.gguf.architectures import make_config
from fairlead_worker.weights.gguf.reader import Gguf, GgufError, part_paths, read_gguf
from fairlead_worker.weights.gguf.tokenizer import Vocabulary, end_tokens, make_tokenizer, special_tokens

FORMAT = 1
"""Of the files. Another number makes them again."""
PATTERN = "*.gguf"
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
"""`general.sampling` -> generation_config.json."""


def gguf_folder(uri: str, path: Path, cache: ModelCache) -> Path:
    """Return a folder with the files that describe the model in `path`, and links to it. Raises ModelLoadError."""
    try:
        parts = part_paths(path)
        folder = _root(cache) / f"{path.stem}-{_key(parts)}"
        if not all((folder / part.name).exists() for part in parts):
            shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there
            _write(folder, read_gguf(path), parts)
        return folder
    except GgufError as error:
        raise ModelLoadError(uri, str(error)) from error
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            cause = f"no space in {_root(cache)} for the files that describe it: free some, or name another folder in FAIRLEAD_MODEL_CACHE"
            raise ModelLoadError(uri, cause) from error
        raise ModelLoadError(uri, f"{error.filename or path} cannot be used: {error.strerror or error}") from error
    except Exception as error:  # a file may hold anything, and every field has its own way to be wrong
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelLoadError(uri, f"{path.name}: it is damaged or not supported ({cause}): fetch or convert it again") from error


def whole_models(folder: Path) -> list[Path]:
    """Return the GGUF models in `folder`: of a split one, the first part. None beside safetensors, which are served then."""
    return [] if any(folder.glob("*.safetensors")) else sorted({part_paths(path)[0] for path in folder.glob(PATTERN)})


def _key(parts: list[Path]) -> str:
    """Return a key that changes with each file: its path, size and time of change."""
    seen = [(str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts if part.exists()]
    return xxhash.xxh3_64_hexdigest(repr((FORMAT, seen)).encode())


def _root(cache: ModelCache) -> Path:
    """Return a folder that can be written: in the cache, or the user's own temporary one."""
    root = cache.root / "fairlead" / "gguf"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK, effective_ids=True):
            return root
    except OSError:
        pass
    own = Path(tempfile.gettempdir()) / f"fairlead-gguf-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.getuid():
        raise OSError(f"{root} cannot be written, and {own} belongs to another user")
    return own


def _write(folder: Path, gguf: Gguf, parts: list[Path]) -> None:
    """Write all files under another name first: a worker that starts meanwhile sees none or all of them."""
    files = _describe(gguf)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (made / name).write_text(text, encoding="utf-8")
        for part in parts:
            (made / part.name).symlink_to(part.resolve())  # `path` may be a link that is removed before its file
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another worker was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _describe(gguf: Gguf) -> dict[str, Any]:
    """Return the content of each file. Raises GgufError."""
    config, vocabulary = make_config(gguf), Vocabulary(gguf)
    sampling = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    generation = {name: value for name, value in sampling.items() if value is not None}
    ends = end_tokens(vocabulary)
    templates = _templates(gguf)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens(vocabulary),
        **({"chat_template": templates} if isinstance(templates, list) else {}),
    }
    return {
        "config.json": config,
        "tokenizer.json": make_tokenizer(vocabulary),
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {**generation, "bos_token_id": config["bos_token_id"], "eos_token_id": ends or None},
        **({"chat_template.jinja": templates} if isinstance(templates, str) else {}),
    }


def _templates(gguf: Gguf) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them if the file has one for tools too."""
    template, tools = (gguf.metadata.get(f"tokenizer.chat_template{suffix}") for suffix in ("", ".tool_use"))
    if (wrong := next((value for value in (template, tools) if not isinstance(value, str | None)), None)) is not None:
        raise GgufError(gguf.path, f"tokenizer.chat_template is {repr(wrong)[:40]}, not a text: convert the model again")
    return [{"name": "default", "template": template}, {"name": "tool_use", "template": tools}] if template and tools else template
