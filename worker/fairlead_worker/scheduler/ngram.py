"""Prompt lookup: what came after the latest tokens when they were there before (Saxena 2023; vLLM's and SGLang's `ngram`)."""

from array import array

_CANDIDATES = 8
"""Earlier places looked at for one proposal: bounds its cost where a text says the same all the time."""
_CATCH_UP = 2048
"""Tokens indexed in one step (about 1 ms): a long prompt is taken in over several steps, and proposes nothing before that."""


class NgramIndex:
    """Where the n-grams of one request's tokens are, for n = `shortest`; grows with the tokens.

    A table of the last place of each n-gram, and for each place the one before it: a token costs one look-up, a proposal a short walk.
    Nothing is ever scanned.
    """

    __slots__ = ("_before", "_latest", "_longest", "_shortest", "_tokens")

    def __init__(self, tokens: "array[int]", shortest: int, longest: int) -> None:
        """`tokens`: the request's own, which only grow."""
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[bytes, int] = {}
        """N-gram -> the end of its last place: the index of the token after it."""
        self._before = array("i", bytes(4 * shortest))
        """For each end, the end of the same n-gram's place before it; 0: there is none. As long as the tokens indexed, plus one."""

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next, or none. Of the places looked at, the one that agrees for longest, up to `longest`
        tokens, and the latest of equals. A text that repeats itself right now goes on repeating."""
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
        for place in range(best + len(draft), best + count):  # it ends at the end of the text: the draft itself goes on from there
            draft.append(draft[place - end])
        return draft

    def _catch_up(self, end: int) -> bool:
        """Takes in new tokens; False where there are too many for one step."""
        tokens, n, latest, before = self._tokens, self._shortest, self._latest, self._before
        if end < n:
            return False
        stop = min(end, len(before) - 1 + _CATCH_UP)
        for place in range(len(before), stop + 1):
            gram = tokens[place - n : place].tobytes()
            before.append(latest.get(gram, 0))
            latest[gram] = place
        return stop == end
