"""FairQueue: in order within a key, keys in turn, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from lorafold.engine.admission import FairQueue

Item = tuple[str, int]


def filled(keys: str, patience: int = 4) -> FairQueue[Item]:
    queue = FairQueue[Item](patience)
    for number, key in enumerate(keys):
        queue.add(key, (key, number))
    return queue


def test_keys_take_turns_and_items_of_a_key_stay_in_order() -> None:
    queue = filled("aaaabac")
    admitted = queue.admit(lambda item: True)
    assert [key for key, _ in admitted] == ["a", "b", "c", "a", "a", "a", "a"]
    assert [number for key, number in admitted if key == "a"] == [0, 1, 2, 3, 5]
    assert len(queue) == 0


def test_a_key_that_was_just_served_is_last_even_if_it_comes_again() -> None:
    queue, room = filled("ab"), 1

    def take(item: Item) -> bool:
        nonlocal room
        room -= 1
        return room >= 0

    assert queue.admit(take) == [("a", 0)]
    queue.add("a", ("a", 2))
    room = 1
    assert queue.admit(take) == [("b", 1)]


def test_an_item_lets_others_pass_only_as_often_as_its_patience() -> None:
    queue = filled("x" + "abcdefgh", patience=3)
    assert [key for key, _ in queue.admit(lambda item: item[0] != "x")] == ["a", "b", "c"]
    assert queue.admit(lambda item: item[0] != "x") == []
    assert queue.admit(lambda item: True)[0] == ("x", 0)


def test_patience_is_counted_anew_for_the_next_item_of_a_key() -> None:
    queue = filled("xxabc", patience=2)
    queue.admit(lambda item: item[0] not in "x")
    assert queue.admit(lambda item: item == ("x", 0)) == [("x", 0)]
    queue.add("d", ("d", 9))
    assert [key for key, _ in queue.admit(lambda item: item[0] != "x")] == ["c", "d"]


def test_removing_takes_out_what_is_gone_and_nothing_else() -> None:
    queue = filled("aabab", patience=1)
    assert queue.remove(lambda item: item[1] in (0, 2)) == [("a", 0), ("b", 2)]
    assert len(queue) == 3
    assert queue.admit(lambda item: True) == [("a", 1), ("b", 4), ("a", 3)]


def test_removing_an_impatient_item_ends_its_hold() -> None:
    queue = filled("xab", patience=1)
    queue.admit(lambda item: item[0] != "x")
    assert queue.admit(lambda item: item[0] != "x") == []
    queue.remove(lambda item: item[0] == "x")
    assert queue.admit(lambda item: True) == [("b", 2)]


@given(
    arrivals=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
    slots=st.integers(1, 3),
    places=st.integers(1, 4),
    patience=st.integers(0, 6),
    work=st.integers(1, 3),
)
def test_nobody_starves_while_a_favourite_keeps_coming(
    arrivals: list[str], slots: int, places: int, patience: int, work: int
) -> None:
    """Items need a place, and a slot that the items of a key share; a favourite never stops."""
    queue = FairQueue[Item](patience)
    for number, key in enumerate(arrivals):
        queue.add(key, (key, number))
    left, running = set(range(len(arrivals))), deque[tuple[Item, int]]()

    def take(item: Item) -> bool:
        held = {other for (other, _), _ in running}
        if len(running) == places or (item[0] not in held and len(held) == slots):
            return False
        running.append((item, work))
        return True

    number, steps = len(arrivals), 0
    order: Counter[str] = Counter()
    while left:
        queue.add("a", ("a", number))
        number += 1
        for key, item in queue.admit(take):
            assert item > order.get(key, -1), "out of order within a key"
            order[key] = item
            left.discard(item)
        running = deque((item, rest - 1) for item, rest in running if rest > 1)
        steps += 1
        # Every item waits for those of its key, each of which waits for all keys' turns at most.
        assert steps <= (len(arrivals) + 1) * (patience + 9) * work, "starved"
