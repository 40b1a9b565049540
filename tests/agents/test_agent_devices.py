"""The same update on one device and on a mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_updates_agree_on_1_2_and_8_devices():
    """State born sharded, batch split, gradients accumulated: the numbers stay the same."""
    script = Path(__file__).with_name("agent_on_devices.py")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "equal on 1, 2 and 8 devices" in result.stdout
