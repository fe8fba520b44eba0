"""What is told of a held set, without Redis: runs, their paths, and a snapshot that is told while the set changes."""

import random

import pytest

from fairlead_index.changes import RUN_BLOCKS, SLACK, Change, Changes
from fairlead_index.redis.scripts import script_source


class Listener:
    """What somebody who is told all changes holds: every change must stand on what was told before it."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def hear(self, changes: list[Change]) -> None:
        for change in changes:
            path = list(change.path)
            assert 1 <= len(path) <= RUN_BLOCKS and 0 <= change.before < len(path)
            if change.kind == "S":
                self.held.update(path)
            else:
                self.held.difference_update(path[change.before :])


def following() -> Changes:
    changes = Changes()
    changes.restart()
    return changes


def told(changes: Changes) -> list[tuple[str, list[int], int]]:
    return [(change.kind, list(change.path), change.before) for change in changes.take(10**6)]


def test_the_scripts_have_the_same_runs() -> None:
    assert f"local RUN = {RUN_BLOCKS}\n" in script_source("match")


def test_a_prompt_is_told_by_runs_and_a_longer_one_goes_on_where_it_ended() -> None:
    changes = following()
    changes.store(range(101, 109), parent=99)  # 99: its root
    assert changes.pending == 8
    assert told(changes) == [("S", [101, 102, 103, 104, 105, 106], 0), ("S", [107, 108], 0)]
    changes.store([109, 110], parent=108)
    changes.store([111], parent=110)
    assert told(changes) == [("S", [107, 108, 109, 110, 111], 2)]
    changes.store([101, 102, 203])  # another one parts from it
    assert told(changes) == [("S", [101, 102, 203], 2)]
    changes.remove([111, 110, 109, 108, 107, 106, 203])
    assert told(changes) == [("R", [107, 108, 109, 110, 111], 0), ("R", [101, 102, 103, 104, 105, 106], 5), ("R", [101, 102, 203], 2)]
    assert changes.pending == 0


def test_what_it_holds_and_what_it_does_not_change_nothing() -> None:
    changes = following()
    changes.store([1, 2, 3])
    told(changes)
    changes.store([1, 2, 3])
    changes.remove([7])
    assert not changes.pending and told(changes) == [] and len(changes) == 3


@pytest.mark.parametrize("seed", range(20))
def test_who_is_told_all_holds_the_same(seed: int) -> None:
    """Also where the set is told anew while it changes, and where only removals may be told for a while."""
    draw = random.Random(seed)
    changes, listener = following(), Listener()
    parents: dict[int, int] = {}
    fresh = iter(range(1, 10**6))
    for _ in range(600):
        action = draw.random()
        if action < 0.45:
            parent = draw.choice([0, *parents])
            chain = [next(fresh) for _ in range(draw.randrange(1, 15))]
            changes.store(chain, parent)
            parents.update(zip(chain, [parent, *chain], strict=False))
        elif action < 0.8:
            gone = []
            for _ in range(draw.randrange(1, 12)):
                inner = set(parents.values())
                if leaves := [block for block in parents if block not in inner]:
                    gone.append(draw.choice(leaves))
                    del parents[gone[-1]]
            changes.remove(gone)
        elif action < 0.85:
            listener = Listener()
            changes.restart()
        elif action < 0.9:
            changes.keep_removals()
            listener.hear(changes.take(10**6))
            assert listener.held <= {*parents}
            changes.restart()
        else:
            listener.hear(changes.take(draw.randrange(1, 40)))
        assert changes.pending >= 0 and len(changes) == len(parents)
    while changes.pending:
        listener.hear(changes.take(7))
    assert listener.held == {*parents} == {*changes.held}


def test_a_backlog_that_is_longer_than_the_set_is_thrown_away() -> None:
    changes = following()
    for number in range(SLACK // 2 + 10):
        changes.store([number + 1])
        changes.remove([number + 1])
    assert not changes.following and not changes.pending


def test_a_parent_that_goes_before_its_child_raises_nothing() -> None:
    """Which the cache never does: a worker must serve on all the same."""
    changes = following()
    changes.store(range(1, 10))
    changes.remove([2, 1, 9, 3, 8])
    changes.restart()
    assert changes.take(100) and not changes.pending
