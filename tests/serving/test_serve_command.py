"""`acrlpd serve` as a real process: what it serves, what it says, and how it stops."""

import dataclasses
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import make_certificates
from serve_process import ServeProcess
from serving_helpers import ask, pi0_observation, state_observation
from small_checkpoints import make_agent, openpi_checkpoint, openpi_config, save_run, state_config
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from acrlpd.cli.main import main
from acrlpd.cli.serve import ServeOptions, limits, load_present
from acrlpd.config import save_config
from acrlpd.models.openpi_checkpoint import OpenPICheckpointError
from acrlpd.policies.checkpoint import Checkpoint, open_checkpoint
from acrlpd.robots.aloha import Aloha
from acrlpd.robots.base import Robot
from acrlpd.robots.droid import Droid
from acrlpd.robots.generic import Generic
from acrlpd.robots.libero import Libero
from acrlpd.serving.export import export_policy
from acrlpd.serving.message_format import unpackb
from acrlpd.serving.serving_policy import load_serving_policy


@pytest.fixture(scope="module")
def cache() -> Path:
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = state_config()
    return save_run(tmp_path_factory.mktemp("runs") / "run", config, {10: make_agent(config)})


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    export_policy(run, run.parent / "out")
    return run.parent / "out"


def reply_of(checkpoint: Checkpoint, message: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What the policy answers without a server."""
    policy = load_serving_policy(checkpoint, **options)
    [reply] = policy.infer([policy.prepare(message)])
    assert isinstance(reply, dict)
    return reply


def test_an_export_is_served_until_sigterm(exported: Path, cache: Path) -> None:
    message = state_observation() | {"seed": 5}
    with ServeProcess(cache, exported, "--best_of_n", "3") as server:
        assert f"loading {exported}, then compiling" in server.said  # nobody sits before an empty terminal
        assert "best of 3, 2 denoising steps" in server.said
        with connect(f"ws://127.0.0.1:{server.port}", compression=None) as connection:
            connection.recv()
            reply = ask(connection, message)
            server.terminate()
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=120)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
    expected = reply_of(open_checkpoint(exported), message, best_of_n=3)
    np.testing.assert_allclose(reply["actions"], expected["actions"], atol=1e-5)
    assert reply["best_of_n"]["index"] == expected["best_of_n"]["index"]


def test_an_export_is_served_encrypted_and_with_a_key(exported: Path, cache: Path, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o600)
    options = ("--tls_cert", files.cert, "--tls_key", files.key, "--api_key_file", tmp_path / "key")
    with ServeProcess(cache, exported, *options, "--max_batch_size", "1") as server:
        url, context = f"wss://127.0.0.1:{server.port}", files.client_context()
        assert f"serving on {url} " in server.said
        headers = {"Authorization": "Api-Key secret"}
        with connect(url, compression=None, ssl=context, additional_headers=headers) as connection:
            connection.recv()
            assert "actions" in ask(connection, state_observation())


def test_a_run_is_followed(tmp_path: Path, cache: Path) -> None:
    """Newer checkpoints answer on the connection that is open; one that clients could not understand does not.

    A checkpoint that is still being read does not hold up the end of the server.
    """
    config = state_config()
    other = state_config(model=dataclasses.replace(config.model, action_horizon=6))
    run = save_run(tmp_path / "run", config, {10: make_agent(config)})
    message = state_observation() | {"seed": 5}
    with (
        ServeProcess(cache, run / "10", "--follow", run, "--max_batch_size", "1") as server,
        connect(f"ws://127.0.0.1:{server.port}", compression=None) as connection,
    ):
        assert unpackb(connection.recv())["checkpoint_step"] == 10  # type: ignore[arg-type]
        assert ask(connection, message)["checkpoint_step"] == 10
        save_run(run, config, {20: make_agent(config, 1)})
        server.wait_for_line("now serving step 20")
        followed = ask(connection, message)
        save_run(run, other, {30: make_agent(other)})
        server.wait_for_line("step 30 cannot be served: .* clients were told: action_horizon 6 instead of 4")
        last = ask(connection, message)
        shutil.copytree(run / "20", tmp_path / "40")
        (tmp_path / "40" / "params" / "checksums.json").unlink()
        os.mkfifo(tmp_path / "40" / "params" / "checksums.json")  # a file on a drive that does not answer
        (tmp_path / "40").rename(run / "40")
        writer = open_when_read(run / "40" / "params" / "checksums.json")
        assert server.stop() == 0
        os.close(writer)
    assert followed["checkpoint_step"] == 20
    expected = reply_of(open_checkpoint(run / "20"), message)
    np.testing.assert_allclose(followed["actions"], expected["actions"], atol=1e-5)
    np.testing.assert_array_equal(last["actions"], followed["actions"])


def test_a_checkpoint_that_training_removes_while_it_is_read_is_replaced_by_its_successor(tmp_path: Path) -> None:
    config = state_config()
    run = save_run(tmp_path / "run", config, {10: make_agent(config)})
    options = ServeOptions(run, max_batch_size=1)
    opened = open_checkpoint(run)
    (run / "10" / "params" / "_METADATA").unlink()  # it is on its way out
    with pytest.raises(OpenPICheckpointError, match="is not a complete openpi checkpoint"):
        load_present(opened, options)  # there is no other
    save_run(run, config, {20: make_agent(config, 1)})
    assert load_present(opened, options).step == 20


def open_when_read(pipe: Path, seconds: float = 300) -> int:
    """The writing end of a pipe, as soon as somebody reads it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, f"nobody reads {pipe}"
            time.sleep(0.05)


def test_an_openpi_checkpoint_is_served_to_openpis_client(tmp_path: Path, cache: Path) -> None:
    client_package = pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi-client is missing")
    checkpoint = openpi_checkpoint(tmp_path)
    save_config(openpi_config(), tmp_path / "tiny.yaml")
    options = ("--config", tmp_path / "tiny.yaml", "--best_of_n", "8", "--max_batch_size", "1")
    dims = open_checkpoint(checkpoint, openpi_config()).load_norm_stats()
    assert dims is not None
    message = pi0_observation() | {"state": np.zeros(dims["state"].dim, np.float32), "seed": 1}
    with ServeProcess(cache, checkpoint, *options) as server:
        assert "has no critics: one candidate per chunk, no best-of-N (--best_of_n 8 is not possible)" in server.said
        client = client_package.WebsocketClientPolicy("127.0.0.1", server.port)
        metadata = client.get_server_metadata()
        assert (metadata["best_of_n"], metadata["has_critics"], metadata["checkpoint_step"]) == (1, False, 100)
        reply = client.infer(message)
        with pytest.raises(RuntimeError, match="best_of_n=2: the served checkpoint has no critics"):
            client.infer(message | {"best_of_n": 2})
    assert reply["best_of_n"] == {"n": 1, "index": 0}
    expected = reply_of(open_checkpoint(checkpoint, openpi_config()), message)
    np.testing.assert_allclose(reply["actions"], expected["actions"], atol=1e-4)


def test_a_damaged_checkpoint_is_named_in_one_message(run: Path, cache: Path, tmp_path: Path) -> None:
    """Reads that end after the first error would print tracebacks around the message."""
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run" / "10" / "params").rglob("d/*"):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(AssertionError) as ended, ServeProcess(cache, tmp_path / "run", "--max_batch_size", "1"):
        pass
    told = str(ended.value)
    assert "acrlpd: " in told and "Traceback" not in told and "Event loop is closed" not in told


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What `acrlpd serve` says when it refuses."""
    assert main(["serve", *map(str, args)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("acrlpd: ") and "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port must lie in [0, 65535]; found 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid, port 8000"),
        (["--max_wait_ms", "-1"], "max_wait_ms must lie in [0, inf); found -1.0"),
        (["--max_message_mib", "0"], "--max_message_mib must be at least 1; found 0"),
        (["--max_clients", "0"], "max_clients must be above 0"),
        (["--max_clients_per_address", "0"], "max_clients_per_address must be above 0"),
        (["--idle_timeout_s", "0"], "idle_timeout_s must lie in (0, inf); found 0.0"),
        (["--tls_cert", "cert.pem"], "--tls_cert needs --tls_key"),
        (["--tls_cert", "cert.pem", "--tls_key", "nowhere"], "--tls_key nowhere cannot be read"),
        (["--request_timeout_s", "nan"], "request_timeout_s must lie in (0, inf); found nan"),
        (["--api_key_file", "nowhere"], "--api_key_file nowhere cannot be read"),
        (["--follow", "nowhere"], "--follow: nowhere is not a directory"),
        (["--best_of_n", "0"], "--best_of_n must be at least 1; found 0"),
        (["--num_steps", "4", "0"], "--num_steps must be at least 1; found [4, 0]"),
        (["--max_concurrent_requests", "0"], "--max_concurrent_requests must be at least 1; found 0"),
        (["--max_batch_size", "-1"], "--max_batch_size must be at least 1; found -1"),
        (["--config", "aloha"], "--config is for checkpoints of openpi"),
        (["--config", "alhoa"], "did you mean 'aloha'?"),
    ],
)
def test_bad_options_are_named(
    exported: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options if "--port" in options or "--host" in options else [*options, "--port", "0"]
    assert message in refused(capsys, exported, *given)


@pytest.mark.parametrize(
    ("robot", "expected"), [(Droid(), (4, 30)), (Aloha(), (2, 45)), (Libero(), (8, 15)), (Generic(), (None, 30))]
)
def test_limits_are_those_of_the_robot_unless_given(robot: Robot, expected: tuple[int | None, float]) -> None:
    names = ("max_concurrent_requests", "request_timeout_s")
    assert limits(ServeOptions(Path()), robot) == dict(zip(names, expected, strict=True))
    given = ServeOptions(Path(), max_concurrent_requests=16, request_timeout_s=5.0)
    assert limits(given, robot) == dict(zip(names, (16, 5.0), strict=True))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    for mode in (0o644, 0o602):
        key.chmod(mode)
        told = refused(capsys, tmp_path, "--port", "0", "--api_key_file", key)
        assert f"every user of this machine can read or write {key} (mode {mode:o})" in told
        assert f"chmod 600 {key}" in told and "secret" not in told


def test_a_port_in_use_is_refused_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in refused(capsys, tmp_path, "--port", str(port))


def test_what_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a directory" in refused(capsys, tmp_path / "nothing", "--port", "0")
    assert "neither an exported directory" in refused(capsys, tmp_path, "--port", "0")
    (tmp_path / "key").write_text("\n")
    (tmp_path / "key").chmod(0o640)
    assert "is empty" in refused(capsys, tmp_path, "--port", "0", "--api_key_file", tmp_path / "key")
    (tmp_path / "key").write_text("one\ntwo\n")  # which no client could send
    assert "must have one line, the key; found 2" in refused(capsys, tmp_path, "--api_key_file", tmp_path / "key")
    (tmp_path / "acrlpd.json").write_text('{"format": 1')
    assert "acrlpd.json is damaged" in refused(capsys, tmp_path, "--port", "0")
    (tmp_path / "acrlpd.json").write_text("[]")
    assert "acrlpd.json is damaged: expected a JSON object, found list" in refused(capsys, tmp_path, "--port", "0")
    (tmp_path / "acrlpd.json").write_text('{"format": 2}')
    missing = "acrlpd.json is damaged: it lacks step, config, assets, serving, critics"
    assert missing in refused(capsys, tmp_path, "--port", "0")
