"""The comparison of two demo runs, the check of the promise about cached tokens, and the text of a conversation."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from fairlead.demo.play import Turn

BLOCK_TOKENS = 16
"""`blockTokens` and `pageTokens` of the manifest."""


def promised_tokens(before: Turn) -> int:
    """Return how many tokens the turn after `before` must find cached: the whole blocks of the prompt that both begin with.

    The answer's blocks are usually cached too. They are not promised: its text may have other tokens in the next prompt.
    """
    return before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def returned_to_pod(turns: Sequence[Turn]) -> list[bool]:
    """Return for each turn after a conversation's first whether it ran on the pod of the turn before."""
    return [turn.pod == before.pod for before, turn in pairwise(turns) if turn.conversation == before.conversation]


def later_turns(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.number > 1]


def broken_promises(turns: Sequence[Turn]) -> list[str]:
    """Return a sentence for each later turn that changed its pod or found too little of its prompt cached."""
    broken = []
    for before, turn in pairwise(turns):
        if turn.conversation != before.conversation:
            continue
        where = f"{turn.conversation}, turn {turn.number}"
        if turn.pod != before.pod:
            broken.append(f"{where}: went to {turn.pod} instead of {before.pod}")
        elif turn.cached < (promised := promised_tokens(before)):
            broken.append(f"{where}: {turn.cached} of {turn.prompt_tokens} tokens cached, promised {promised}")
    return broken


def side_by_side(prefix_aware: Sequence[Turn], random: Sequence[Turn]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("conversation\nturn")
    table.add_column("prompt\ntokens", justify="right")
    for policy in ("PrefixAware", "Random"):
        table.add_column(f"[bold]{policy}[/]\npod")
        table.add_column("predicted\n(tokens)", justify="right")
        table.add_column("cached\n(tokens)", justify="right")
        table.add_column("TTFT\n(ms)", justify="right")
    for left, right in zip(prefix_aware, random, strict=True):
        if left.number == 1 and left is not prefix_aware[0]:
            table.add_section()
        table.add_row(f"{left.conversation} {left.number}", str(left.prompt_tokens), *_cells(left), *_cells(right))
    return table


def _cells(turn: Turn) -> list[str]:
    predicted = "-" if turn.predicted is None else str(turn.predicted)
    cached = f"[green]{turn.cached}[/]" if turn.cached_share > 0.5 else str(turn.cached)
    return [turn.pod, predicted, cached, f"{1000 * turn.ttft:.0f}"]


def dialogue(turns: Sequence[Turn]) -> str:
    """Return the questions and answers of the first conversation as text."""
    shown = [turn for turn in turns if turn.conversation == turns[0].conversation]
    lines = [f"The conversation of {turns[0].conversation}:"]
    for turn in shown:
        lines += [f"  > {turn.question}", f"    {' '.join(turn.answer.split())}{'' if turn.is_whole else ' …'}"]
    return "\n".join(lines)


def summary(prefix_aware: Sequence[Turn], random: Sequence[Turn]) -> str:
    """Return the figures of later turns (from the second on), and the ratio of their TTFTs."""
    lines = []
    for policy, turns in (("PrefixAware", prefix_aware), ("Random", random)):
        back, after = returned_to_pod(turns), later_turns(turns)
        share = sum(turn.cached for turn in after) / sum(turn.prompt_tokens for turn in after)
        mean, median = (1000 * figure([turn.ttft for turn in after]) for figure in (statistics.fmean, statistics.median))
        lines.append(
            f"{policy:<12} turns 2+: {sum(back)} of {len(back)} back on their pod, {share:.0%} of prompt tokens cached, "
            f"TTFT mean {mean:.0f} ms, median {median:.0f} ms"
        )
    ratio = statistics.fmean(turn.ttft for turn in later_turns(random)) / statistics.fmean(turn.ttft for turn in later_turns(prefix_aware))
    lines.append(f"TTFT, Random / PrefixAware, mean of turns 2+: {ratio:.1f} x")
    return "\n".join(lines)
