import os
import pathlib

import pytest

from acrlpd.monitoring.run_monitor import DeviceMemory, device_memory


def test_host_memory_is_counted_in_the_pages_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ARM machines have pages of 64 KiB."""
    here = device_memory().host
    assert here is not None
    page_size = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("acrlpd.monitoring.run_monitor.os.sysconf", lambda name: 16 * page_size)
    assert device_memory().host == pytest.approx(16 * here, rel=0.1)


def test_a_run_goes_on_where_the_system_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no /proc."""
    monkeypatch.setattr("acrlpd.monitoring.run_monitor._STATM", pathlib.Path("/proc/self/none"))
    memory = device_memory()
    assert memory.host is None and str(memory).endswith("host memory not known")


def test_memory_as_the_log_shows_it() -> None:
    gpu = DeviceMemory(in_use=3 * 2**30, peak=5 * 2**30, limit=80 * 2**30, host=2**30)
    assert str(gpu) == "device 3 GiB of 80 GiB, peak 5 GiB, host 1 GiB"
    cpu = DeviceMemory(in_use=None, peak=None, limit=None, host=2**30)
    assert str(cpu) == "device memory not reported by this backend, host 1 GiB"
