"""How the layers of a model share pages: all in one page, or in groups whose pages have lives of their own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model with sliding windows. Every group has a page of its own for each `page_size` tokens, all from one pool.

    The pages of all groups have the same size, so any page serves any group. The idea is that of vLLM's hybrid KV cache manager
    (docs.vllm.ai, "Hybrid KV Cache Manager"); SGLang splits memory into one pool for each kind of layer instead.
    """

    full: int
    """Groups of layers that read all tokens: 0 or 1. It is the first group."""
    windowed: int
    """Groups of layers that read the last `window` tokens: 1 or more."""
    window: int
    """Tokens, with the one that reads them."""

    @property
    def count(self) -> int:
        return self.full + self.windowed

    def pages(self, pages: int, page_size: int, chunk_pages: int = 0) -> int:
        """Return the most pages, of all groups, that a request of `pages` pages holds at once. chunk_pages: of prompt that it computes."""
        window = min(pages, -(-self.window // page_size) + 1 + chunk_pages)
        return pages * self.full + window * self.windowed
