"""A minimal prompt format: one token for each byte, and a plain chat template."""

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fairlead_common.prompts.encoder import PromptFormat, digest

MODEL = "stand-in"
BLOCK_TOKENS = 16


def make_format(model: str = MODEL, revision: str = "r1") -> PromptFormat:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = tokenizer.to_str()
    return PromptFormat(
        tokenizer_json=text,
        tokenizer_digest=digest(text),
        model_digest=revision,
        model_names=[model],
        block_tokens=BLOCK_TOKENS,
        max_model_len=1_000_000,
        chat_template="{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )


def encoded(format: PromptFormat) -> tuple[bytes, str]:
    """Return body and ETag."""
    body = msgspec.json.encode(format)
    return body, f'"{digest(body.decode())}"'
