"""Pairwise test cases: few cases that cover every pair of values. Most bugs of combined settings need two of them (Kuhn et al., NIST)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Case = dict[str, object]


def pairwise(dimensions: Mapping[str, Sequence[object]], allowed: Callable[[Case], bool] = lambda case: True) -> Iterator[Case]:
    """Return greedy pairwise cases, the same at each call.

    A case begins with an uncovered pair, and takes for each other dimension the value that covers most new pairs. `allowed` also gets
    unfinished cases; a case that it rejects must stay rejected with any completion.
    """
    missing = dict.fromkeys(
        ((a, x), (b, y)) for a, b in combinations(dimensions, 2) for x, y in product(dimensions[a], dimensions[b]) if allowed({a: x, b: y})
    )

    def new_pairs(case: Case, name: str, value: object) -> int:
        pairs = ((((name, value), each), (each, (name, value))) for each in case.items())
        return sum(one in missing or other in missing for one, other in pairs)

    while missing:
        case: Case = dict(next(iter(missing)))
        for name, values in dimensions.items():
            if name not in case:
                possible = [value for value in values if allowed(case | {name: value})]
                case[name] = max(possible, key=lambda value: new_pairs(case, name, value))  # called immediately
        case = {name: case[name] for name in dimensions}
        for pair in combinations(case.items(), 2):
            missing.pop(pair, None)
        yield case
