"""The tokenizer of a model's folder, which the start of an engine needs twice: for the text of its trials and for the prompt format."""

from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast


@lru_cache(maxsize=1)
def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of the folder. Raises what transformers raises, and ValueError if there is no fast form.

    The last one is kept until `load_tokenizer.cache_clear()`: Gemma's takes two seconds to read.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError("it has no fast form (tokenizer.json)")
    return tokenizer
