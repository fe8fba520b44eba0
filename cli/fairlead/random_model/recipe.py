"""The description of a random model: data and checks, without torch or transformers."""

from dataclasses import asdict, dataclass
from typing import Any

from fairlead.errors import UserError

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "gemma3", "gpt2")
DTYPES = ("float32", "bfloat16", "float16")
SLIDING_WINDOW = ("mistral", "gemma3")
MIN_VOCAB = 259 + 1
"""256 byte tokens, three special tokens and at least one merge."""
MAX_PARAMETERS = 16_000_000_000
"""Upper limit, because a typing error (`--hidden 40960`) must not fill the disk."""
MAX_VOCAB = 300_000


@dataclass(frozen=True)
class Recipe:
    """A random model. Equal recipes give equal bytes with equal versions of Python, torch and tokenizers.

    `intermediate` and `head_dim` are widths; `max_positions` and `sliding_window` are tokens (window 0: full attention in all layers).
    """

    arch: str = "qwen3"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 2048
    max_positions: int = 4096
    sliding_window: int = 0
    seed: int = 0
    dtype: str = "float32"

    @classmethod
    def of(cls, arch: str = "qwen3", **options: Any) -> "Recipe":
        """Return a recipe of these fields, with defaults for missing ones. Raises UserError, which names the flag and the correction."""
        asked = cls(arch, **options)
        hidden, heads = asked.hidden, asked.heads
        if arch not in ARCHITECTURES:
            raise UserError(f"--arch {arch}: unknown; choose one of {', '.join(ARCHITECTURES)}")
        if not 0 <= asked.seed < 2**64:
            raise UserError(f"--seed {asked.seed}: must be 0 to 2**64 - 1")
        if heads < 1:
            raise UserError(f"--heads {heads}: must be at least 1")
        if "head_dim" not in options and hidden % heads:
            raise UserError(
                f"--heads {heads} does not divide --hidden {hidden}: choose --hidden {_next_multiple(hidden, heads)}, or give --head-dim"
            )
        defaults = {
            "kv_heads": heads if arch == "gpt2" or heads % 2 else heads // 2,
            "head_dim": hidden // heads,
            "intermediate": 4 * hidden if arch == "gpt2" else 2 * hidden,
            "sliding_window": 256 if arch in SLIDING_WINDOW else 0,
        }
        recipe = cls(arch, **(defaults | options))
        recipe.check()
        return recipe

    def check(self) -> None:
        """Raise UserError for the first invalid value."""
        for flag, value in (
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("intermediate", self.intermediate),
            ("max-positions", self.max_positions),
        ):
            if value < 1:
                raise UserError(f"--{flag} {value}: must be at least 1")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype}: unknown; choose one of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}: choose one of {fitting}")
        if not MIN_VOCAB <= self.vocab <= MAX_VOCAB:
            raise UserError(f"--vocab {self.vocab}: must be {MIN_VOCAB} (256 bytes, 3 special tokens, 1 merge) to {MAX_VOCAB}")
        if self.head_dim % 2 and self.arch != "gpt2":
            raise UserError(f"--head-dim {self.head_dim}: rotary position embedding needs an even number; choose {self.head_dim + 1}")
        if self.arch == "gpt2":
            self._check_gpt2()
        if self.sliding_window < 0 or (self.sliding_window and self.arch not in SLIDING_WINDOW):
            raise UserError(
                f"--sliding-window {self.sliding_window}: only {' and '.join(SLIDING_WINDOW)} have a window; leave it out for {self.arch}"
            )
        if self.arch == "gemma3" and not self.sliding_window:
            raise UserError("--sliding-window 0: gemma3 alternates windowed and full layers; give a window of at least 1 token")
        if self.parameters > MAX_PARAMETERS:
            raise UserError(
                f"{self.parameters / 1e9:.1f} billion parameters, above the limit of {MAX_PARAMETERS / 1e9:.0f}; lower --hidden or --layers"
            )

    def _check_gpt2(self) -> None:
        if self.kv_heads != self.heads:
            raise UserError(f"--kv-heads {self.kv_heads}: gpt2 has one KV head for each head; leave it out")
        if self.head_dim * self.heads != self.hidden:
            raise UserError(f"--head-dim {self.head_dim}: gpt2 has head-dim = hidden / heads = {self.hidden // self.heads}; leave it out")

    @property
    def parameters(self) -> int:
        """Return the approximate number of weights: embeddings (not tied), attention and MLP, without norms and biases."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.intermediate * (2 if self.arch == "gpt2" else 3)
        return 2 * self.vocab * self.hidden + self.layers * (attention + mlp)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _next_multiple(value: int, step: int) -> int:
    return -(-value // step) * step
