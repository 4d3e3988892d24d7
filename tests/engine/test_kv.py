"""The KV cache: nobody has a place that another has, and nothing is lost."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lorafold.engine.kv import KvCache, Stretch

CPU = torch.device("cpu")


@given(
    size=st.integers(0, 300),
    actions=st.lists(st.tuples(st.booleans(), st.integers(1, 80)), max_size=40),
)
def test_stretches_never_overlap_and_all_of_them_come_back(
    size: int, actions: list[tuple[bool, int]]
) -> None:
    cache = KvCache(size, CPU)
    taken: list[Stretch] = []
    for wants, number in actions:
        if wants or not taken:
            stretch = cache.reserve(number)
            if stretch is not None:
                assert stretch.length >= number
                taken.append(stretch)
        else:
            cache.release(taken.pop(number % len(taken)))
        places = [p for s in taken for p in range(s.start, s.start + s.length)]
        assert len(places) == len(set(places)) == cache.num_tokens - cache.num_free
        assert all(place < cache.num_tokens for place in places)
        assert all(s.start % 16 == s.length % 16 == 0 for s in taken)
    for stretch in taken:
        cache.release(stretch)
    if cache.num_tokens:
        assert cache.reserve(cache.num_tokens) == Stretch(0, cache.num_tokens)


def test_keys_and_values_are_where_they_were_put() -> None:
    cache = KvCache(32, CPU)
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    index = torch.tensor([5, 6, 20])
    keys, values = cache.write(7, index, key, value)
    again = cache.write(7, torch.tensor([0]), torch.ones(1, 2, 4), torch.ones(1, 2, 6))
    assert (keys.shape, values.shape) == ((32, 2, 4), (32, 2, 6))
    assert again[0].data_ptr() == keys.data_ptr()
    assert torch.equal(keys[index], key)
    assert torch.equal(values[index], value)
    assert keys[1:5].count_nonzero() == 0
    other, _ = cache.write(8, torch.tensor([5]), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    assert other.shape == (32, 1, 4)


def test_the_cache_can_be_written_after_inference_mode() -> None:
    cache = KvCache(16, CPU)
    with torch.inference_mode():
        cache.write(0, torch.tensor([0]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    cache.write(0, torch.tensor([1]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))


def test_spare_places_belong_to_no_request() -> None:
    cache = KvCache(40, CPU, num_spare=3)
    whole = cache.reserve(32)
    assert (whole, cache.reserve(1), cache.num_tokens) == (Stretch(0, 32), None, 32)
    assert [cache.spare(at) for at in range(3)] == [Stretch(32, 1), Stretch(33, 1), Stretch(34, 1)]
    keys, _ = cache.write(0, torch.tensor([34]), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    assert keys.shape == (cache.num_places, 2, 4) == (35, 2, 4)
