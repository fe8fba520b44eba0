"""How the layers of a model share pages: all in one page, or in groups whose pages have lives of their own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model with sliding windows or chunked attention. Every group has a page of its own for each `page_size` tokens, all
    from one pool.

    The pages of all groups have the same size, so any page serves any group. The idea is that of vLLM's hybrid KV cache manager
    (docs.vllm.ai, "Hybrid KV Cache Manager"); SGLang splits memory into one pool for each kind of layer instead.
    """

    full: int
    """Groups of layers that read all tokens: 0 or 1. It is the first group."""
    windowed: int
    """Groups of layers that read the last `window` tokens, or those of the token's chunk: 1 or more."""
    window: int
    """Tokens, with the one that reads them."""
    chunked: bool = False
    """Whether a token at position p reads only those from p // window * window on (Llama 4)."""

    @property
    def count(self) -> int:
        return self.full + self.windowed

    def first_token(self, position: int) -> int:
        """Return the first token that the windowed groups read for the token at `position`."""
        return position // self.window * self.window if self.chunked else max(0, position - self.window + 1)

    def first_kept(self, computed: int) -> int:
        """Return the first token that they keep after `computed` tokens, the last of which may be computed again."""
        return self.first_token(max(computed - 1, 0))

    def reach(self, page_size: int) -> int:
        """Return the most pages before a point that a request needs to continue there."""
        return -(-self.window // page_size) + (self.chunked and self.window % page_size > 0)

    def pages(self, pages: int, page_size: int, chunk_pages: int = 0) -> int:
        """Return the most pages, of all groups, that a request of `pages` pages holds at once. chunk_pages: of prompt that it computes."""
        window = min(pages, self.reach(page_size) + 1 + chunk_pages)
        return pages * self.full + window * self.windowed
