"""N-gram lookup: propose the tokens that followed an earlier occurrence of the latest ones (Saxena 2023; vLLM's and SGLang's `ngram`)."""

from array import array

_CANDIDATES = 8
"""Most earlier occurrences that one proposal compares. It bounds the cost for a text that repeats itself."""
_CATCH_UP = 2048
"""Most tokens indexed in one step (about 1 ms). A longer prompt is indexed over several steps, and has no proposals before."""


class NgramIndex:
    """The occurrences of each n-gram in one request's tokens, for n = `shortest`. It grows with the tokens.

    It has the last occurrence of each n-gram, and for each occurrence the one before it. So a token costs one look-up and a proposal a
    short walk, whatever the length of the text.
    """

    __slots__ = ("_before", "_latest", "_longest", "_shortest", "_tokens")

    def __init__(self, tokens: "array[int]", shortest: int, longest: int) -> None:
        """`tokens`: the request's own array, which only grows. `longest`: tokens compared to choose between occurrences."""
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[bytes, int] = {}
        """N-gram -> the end of its last occurrence: the index of the token after it."""
        self._before = array("i", bytes(4 * shortest))
        """For each end, the end of the same n-gram's occurrence before it; 0: none. Its length is the number of indexed tokens + 1."""

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens that may come next.

        They follow the occurrence with the longest match, the latest of equals. If the text ends before `count` tokens, it is continued as
        a repetition.
        """
        tokens, end = self._tokens, len(self._tokens)
        if not self._catch_up(end):
            return []
        best = best_length = 0
        at = self._before[end]
        for _ in range(_CANDIDATES):
            if not at:
                break
            length = self._shortest
            while length < self._longest and length < at and tokens[at - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = at, length
            if length == self._longest:
                break
            at = self._before[at]
        if not best:
            return []
        draft = tokens[best : best + count].tolist()
        for place in range(best + len(draft), best + count):  # past the end of the text: repeat the draft
            draft.append(draft[place - end])
        return draft

    def _catch_up(self, end: int) -> bool:
        """Index new tokens. Return False if some are left for the next step."""
        tokens, n, latest, before = self._tokens, self._shortest, self._latest, self._before
        if end < n:
            return False
        stop = min(end, len(before) - 1 + _CATCH_UP)
        for place in range(len(before), stop + 1):
            gram = tokens[place - n : place].tobytes()
            before.append(latest.get(gram, 0))
            latest[gram] = place
        return stop == end
