"""Memory that is lent again once nobody has a tensor in it."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.loader.buffers import BufferPool


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    pool = BufferPool(1 << 24)
    first = pool.empty((1, 4, 1000, 128), torch.float32)
    view, where = first[:, :2], first.data_ptr()
    del first
    other = pool.empty((1, 4, 1000, 128), torch.float32)
    assert other.data_ptr() != where
    view.fill_(7.0)
    del view
    # Of nearly the same size, and of another type.
    again = pool.empty((1, 4, 1020, 128), torch.float32)
    assert again.data_ptr() == where
    del again
    assert pool.empty((1, 4, 2000, 128), torch.bfloat16).data_ptr() == where


def test_no_more_is_kept_than_allowed() -> None:
    pool = BufferPool(4 << 20)
    tensors = [pool.empty((1 << 20,), torch.float16) for _ in range(8)]
    del tensors
    assert pool.free_bytes <= 4 << 20


@given(st.lists(st.integers(1, 1 << 21), min_size=1, max_size=12), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_lent_at_the_same_time_does_not_overlap(sizes: list[int], dtype: torch.dtype) -> None:
    pool = BufferPool(8 << 20)
    for _ in range(2):
        tensors = [pool.empty((size,), dtype).fill_(number) for number, size in enumerate(sizes)]
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
        del tensors


def test_threads() -> None:
    pool = BufferPool(4 << 20)

    def use(number: int) -> bool:
        tensor = pool.empty((1 << 18,), torch.float32).fill_(number)
        return bool((tensor == number).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(400)))
    gc.collect()
    assert pool.free_bytes <= 4 << 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_its_own() -> None:
    pool = BufferPool(4 << 20)
    tensor = pool.empty((1 << 18,), torch.float32).fill_(1.0)
    child = os.fork()
    if not child:
        tensor.fill_(2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((tensor == 1.0).all())
