import logging
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from acrlpd.monitoring.memory import GPUMemoryMonitor, device_memory, log_memory_usage


def shape(*lengths: int, spec: tuple = ()) -> jax.ShapeDtypeStruct:
    mesh = AbstractMesh((2, 4), ("batch", "fsdp"))
    return jax.ShapeDtypeStruct(lengths, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


STATE = {
    "policy_params": {"kernel": shape(2**20, 4, spec=("fsdp",)), "bias": shape(4)},
    "critics": shape(2**20),
    "step": shape(),
}


def test_components_are_counted_on_one_device_and_in_all() -> None:
    components = GPUMemoryMonitor().analyze_train_state_memory(STATE)
    assert list(components) == ["policy_params", "critics", "step"]
    policy = components["policy_params"]
    assert (policy.num_arrays, policy.total_bytes, policy.device_bytes) == (2, 2**24 + 16, 2**22 + 16)
    assert components["critics"].device_bytes == components["critics"].total_bytes == 2**22


def test_host_memory_is_counted_in_the_pages_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ARM machines have pages of 64 KiB."""
    here = device_memory().host
    page_size = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("acrlpd.monitoring.memory.os.sysconf", lambda name: 16 * page_size)
    assert device_memory().host == pytest.approx(16 * here, rel=0.1)


def test_the_report_tells_moments_in_order() -> None:
    monitor = GPUMemoryMonitor()
    monitor.checkpoint_memory("before")
    monitor.checkpoint_memory("after init", STATE)
    lines = monitor.get_memory_report().splitlines()
    assert lines[0].startswith("before: ")
    assert lines[1].startswith("after init: ")
    assert lines[2].split()[0] == "policy_params"
    assert "4.0 MiB on a device" in lines[2]


def test_an_agent_is_a_state() -> None:
    from acrlpd.agents import TrainState

    state = TrainState(step=jnp.zeros(()), params={"w": jnp.zeros(8)}, opt_state=None)  # type: ignore[arg-type]
    components = GPUMemoryMonitor().analyze_train_state_memory(state)
    assert {name: c.total_bytes for name, c in components.items()} == {"params": 32, "step": 4}


def test_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "acrlpd"):
        memory = log_memory_usage(7, STATE)
    assert memory.host > 2**20
    assert "training step 7: " in caplog.text
    assert "critics" in caplog.text
