"""The tokenizer of a model's folder, which the start of an engine needs twice: for the text of its trials and for the prompt format."""

import re
from functools import lru_cache
from json import JSONDecodeError
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fairlead_worker.weights.tokenizer_files import TokenizerFileError, convert_tokenizer

_HINT = re.compile("pip install|need to have|requires|huggingface|tiktoken|sentencepiece|mistral.common", re.IGNORECASE)
"""Advice of a library that does not help here: nothing can be installed in an image, and no model's code runs."""
_FILES = ("tokenizer.json", "tekken.json", "*.model", "*.tiktoken", "vocab*", "merges.txt")
_ADVICE = (
    "add the model's tokenizer.json (transformers' save_pretrained writes it), tokenizer.model (SentencePiece) or tekken.json to its folder"
)


@lru_cache(maxsize=1)
def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of the folder. Raise ValueError with the reason.

    The last one is kept until `load_tokenizer.cache_clear()`: Gemma's takes two seconds to read.
    """
    # Without one, some classes of transformers give a tokenizer of three tokens.
    if not any(any(folder.glob(name)) for name in _FILES):
        raise ValueError(f"the folder has none; {_ADVICE}")
    try:
        tokenizer = convert_tokenizer(folder) or AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(_explain(folder, error)) from error
    if not tokenizer.is_fast:
        raise ValueError(f"it has no fast form; {_ADVICE}")
    return tokenizer


def _explain(folder: Path, error: Exception) -> str:
    """Return what is wrong, without a library's advice."""
    found = sorted({path for name in (*_FILES, "tokenizer_config.json") for path in folder.glob(name) if path.is_file()})
    if pointers := [path.name for path in found if _starts_with(path, b"version https://git-lfs")]:
        return f"{', '.join(pointers)}: only Git LFS's pointer to the file is there, download it again with git lfs pull"
    if isinstance(error, JSONDecodeError | KeyError | TypeError | AttributeError):  # of files of another form
        return f"{', '.join(path.name for path in found)}: one of them is damaged ({error!r:.100}), download it again"
    if "trust_remote_code" in str(error):
        return f"it is Python code of the model, which is not run here; {_ADVICE}"
    if isinstance(error, TokenizerFileError) or not _HINT.search(str(error)):
        return " ".join(str(error).split())
    return f"{', '.join(path.name for path in found if path.name != 'tokenizer_config.json')} cannot be read here; {_ADVICE}"


def _starts_with(path: Path, expected: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(expected)) == expected
