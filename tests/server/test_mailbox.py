"""What the engine's thread posts arrives in the event loop: all, in order, by few wake-ups."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from lorafold.server.mailbox import Mailbox, mailbox_of


def test_a_wake_up_is_for_all_that_is_on_its_way() -> None:
    async def main() -> tuple[list[int], int]:
        loop, seen, wakes = asyncio.get_running_loop(), list[int](), [0]
        wake = loop.call_soon_threadsafe

        def counted(*call: Any) -> Any:
            wakes[0] += 1
            return wake(*call)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        mailbox = Mailbox(loop)
        for turn in range(3):
            # The loop cannot run meanwhile: this thread waits for the other one.
            thread = threading.Thread(
                target=lambda turn=turn: [
                    mailbox.post(seen.append, 10 * turn + n) for n in range(10)
                ]
            )
            thread.start()
            thread.join()
            await asyncio.sleep(0)
        return seen, wakes[0]

    assert asyncio.run(main()) == (list(range(30)), 3)


def test_nothing_is_lost_between_many_threads() -> None:
    async def main() -> list[tuple[int, int]]:
        mailbox, seen = mailbox_of(asyncio.get_running_loop()), list[tuple[int, int]]()

        def post(number: int) -> None:
            for n in range(500):
                mailbox.post(seen.append, (number, n))

        await asyncio.gather(*(asyncio.to_thread(post, number) for number in range(6)))
        await asyncio.sleep(0.05)
        return seen

    seen = asyncio.run(main())
    assert len(seen) == 3000
    for number in range(6):
        assert [n for poster, n in seen if poster == number] == list(range(500))


def test_whoever_posts_to_a_loop_that_is_closed_is_told_so() -> None:
    loop = asyncio.new_event_loop()
    mailbox, seen = Mailbox(loop), list[int]()
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.post(seen.append, 1)
    del loop
    gc.collect()
    with pytest.raises(RuntimeError, match="closed"):
        mailbox.post(seen.append, 1)


def test_all_in_a_loop_share_one_and_no_loop_is_kept() -> None:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        assert mailbox_of(loop) is mailbox_of(loop)
        return weakref.ref(loop)

    loops = [asyncio.run(main()) for _ in range(2)]
    gc.collect()
    assert [loop() for loop in loops] == [None, None]
