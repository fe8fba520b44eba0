"""A byte-level BPE tokenizer trained on a text that is part of Python, with a ChatML template.

The text is `pydoc_data.topics`, the language reference behind `help()`: some 460,000 characters of English and code, part of every Python
installation. The trainer is deterministic, so one Python version always gives one tokenizer.
"""

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Each token's position is its id."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def corpus() -> list[str]:
    """Return the training texts in a fixed order."""
    return [topics[name] for name in sorted(topics)]


def train_tokenizer(vocab: int) -> Tokenizer:
    """Train a BPE tokenizer with exactly `vocab` tokens.

    The text gives some 9,000. A larger vocabulary (as large as a real one) is filled up with plain tokens `<|extra_0|>`, …, which decode to
    that text and encode back to themselves.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    missing = vocab - tokenizer.get_vocab_size()
    if missing > 0:
        tokenizer.add_tokens([AddedToken(f"<|extra_{n}|>", normalized=False, special=False) for n in range(missing)])
    return tokenizer


def save_tokenizer(directory: Path, *, vocab: int, max_positions: int) -> None:
    """Train and write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
    PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(vocab),
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
