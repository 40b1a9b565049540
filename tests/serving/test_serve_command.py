"""`acrlpd serve` as a real process: what it says, what it answers, and how it stops."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from serving_helpers import ask, make_agent, save_run, state_config, state_observation
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from acrlpd.serving.commands import serve_main
from acrlpd.serving.export import export_policy
from acrlpd.serving.policy_checkpoint import open_policy_checkpoint
from acrlpd.serving.serving_policy import load_serving_policy


def test_a_process_serves_an_export_and_drains_on_sigterm(tmp_path: Path) -> None:
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config)})
    export_policy(run, tmp_path / "out")
    command = [sys.executable, "-m", "acrlpd.cli", "serve", str(tmp_path / "out"), "--port", "0", "--best_of_n", "3"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    killer = threading.Timer(120, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        lines: list[str] = []
        port = None
        for line in process.stderr:
            lines.append(line)
            match = re.search(r"serving on ws://127\.0\.0\.1:(\d+)", line)
            if match:
                port = int(match.group(1))
                break
        assert port is not None, "".join(lines)
        assert "best of 3, 2 denoising steps" in "".join(lines)
        with connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
            connection.recv()
            reply = ask(connection, state_observation() | {"seed": 5})
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=30)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, rest
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    policy = load_serving_policy(open_policy_checkpoint(tmp_path / "out"), best_of_n=3)
    [expected] = policy.infer([policy.prepare(state_observation() | {"seed": 5})])
    assert isinstance(expected, dict)
    np.testing.assert_allclose(reply["actions"], expected["actions"], atol=1e-5)
    assert reply["best_of_n"]["index"] == expected["best_of_n"]["index"]


def test_bad_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        serve_main([str(tmp_path / "nothing")])
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        serve_main([str(tmp_path), "--api_key_file", str(tmp_path / "key")])
