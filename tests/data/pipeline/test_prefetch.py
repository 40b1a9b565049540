import gc
import threading
import time

import jax
import numpy as np
import pytest

from acrlpd.data.pipeline.prefetch import BufferPool, Prefetcher


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_results_come_in_order(num_workers):
    def build(step):
        time.sleep(0.002 * (step % 3))
        return step * step

    prefetcher = Prefetcher(build, first_step=5, num_workers=num_workers, depth=3)
    assert [prefetcher.get() for _ in range(20)] == [step * step for step in range(5, 25)]
    assert prefetcher.step == 25
    prefetcher.close()


@pytest.mark.parametrize(("num_workers", "depth"), [(1, 3), (4, 2)])
def test_no_more_is_prepared_than_asked_for(num_workers, depth):
    started = []
    prefetcher = Prefetcher(lambda step: started.append(step), first_step=0, num_workers=num_workers, depth=depth)
    for taken in range(3):
        expected = taken + max(depth, num_workers)
        deadline = time.monotonic() + 120
        while len(started) < expected and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)  # one too many would start now
        assert len(started) == expected
        prefetcher.get()
    prefetcher.close()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_errors_reach_the_consumer(num_workers):
    def build(step):
        if step == 2:
            raise OSError("disk gone")
        return step

    prefetcher = Prefetcher(build, first_step=0, num_workers=num_workers, depth=2)
    assert [prefetcher.get(), prefetcher.get()] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone") as error:
            prefetcher.get()
    if num_workers:
        assert "step 2" in error.value.__notes__[0]
    prefetcher.close()


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("acrlpd-data")]


def test_closing_ends_the_threads():
    together = threading.Barrier(3)
    prefetcher = Prefetcher(lambda step: step < 3 and together.wait(120), first_step=0, num_workers=3, depth=2)
    prefetcher.get()
    assert len(threads()) == 3
    prefetcher.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.get()


def test_dropping_it_ends_the_threads():
    prefetcher = Prefetcher(lambda step: step, first_step=0, num_workers=2, depth=2)
    prefetcher.get()
    del prefetcher
    gc.collect()
    for thread in threads():
        thread.join(120)
    assert threads() == []


def test_a_buffer_comes_back_when_its_last_view_is_gone():
    pool = BufferPool()
    first = pool.take((4, 3))
    address = first.ctypes.data
    view = first[1:, ::2]
    del first
    assert pool.take((4, 3)).ctypes.data != address
    del view
    assert address in {pool.take((4, 3)).ctypes.data for _ in range(2)}
    assert pool.allocated_bytes == 24


def test_shapes_that_change_do_not_add_up():
    """Where dataset and replay are one buffer, each batch has other numbers of windows of both."""
    pool = BufferPool()
    rng = np.random.default_rng(0)
    most, lent = 0, []
    for value in range(200):
        array = pool.take((int(rng.integers(1, 33)), 8, 8, 3))
        array[:] = value
        lent.append((value, array))
        del array
        most = max(most, sum(array.nbytes for _, array in lent))
        assert all((array == filled).all() for filled, array in lent)
        del lent[: max(0, len(lent) - 3)]
    assert most <= pool.allocated_bytes <= 4 * 32 * 8 * 8 * 3


def test_a_device_array_keeps_its_buffer():
    """A transfer may still run, and on a CPU the device array is the buffer: neither may be filled again."""
    pool = BufferPool()
    arrays = []
    for value in range(12):
        buffer = pool.take((64, 65536))
        buffer[:] = value
        arrays.append((value, jax.device_put(buffer[2:])))
        del buffer
        if value % 3 == 2:
            arrays.pop(0)
    assert pool.allocated_bytes <= 9 * 64 * 65536
    for expected, array in arrays:
        assert (np.asarray(array) == expected).all()
