"""Alerts reach a real server and a real program, once, and their failures never reach the run."""

import http.server
import json
import logging
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from monitoring_helpers import state_config

from acrlpd.config import to_dict, validate_config
from acrlpd.monitoring import alerts
from acrlpd.monitoring.alerts import ALERTS_FILE, Alert, Alerts
from acrlpd.monitoring.run_monitor import RunMonitor

TROUBLE = Alert("q_divergence", "error", 30, "Q is 400")


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps what is posted; answers with `status`, or with nothing until `release`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[dict[str, Any]] = []
        self.status: int | None = 200
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-path"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.received.append(json.loads(content))
        if self.server.status is None:
            self.server.release.wait()
            return
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.release.set()
        server.shutdown()


def test_trouble_and_the_end_are_posted_once(
    tmp_path: pathlib.Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_WEBHOOK", receiver.url)
    config = state_config(tmp_path, exp_name="first", logging__alerts__webhook_variable="LAB_WEBHOOK")
    assert receiver.url not in str(to_dict(config))  # checkpoints, exports and the hub get the config
    for _ in range(2):  # the second time as a run that was started again
        monitor = RunMonitor(config, tmp_path, is_primary=True)
        for step in (1, 2, 3):
            monitor.on_line({"step": step, "phase": "offline", "update_skipped": 1.0, "critic_grad_norm": None})
        monitor.on_end("finished", 3, "finished at step 3; success 84 %")
        monitor.close()
    assert [message["kind"] for message in receiver.received] == ["non_finite_updates", "finished", "finished"]
    trouble, end, _ = receiver.received
    assert trouble["title"] == "debug/first: non_finite_updates"
    assert (trouble["severity"], trouble["step"], trouble["directory"]) == ("error", 1, str(tmp_path))
    assert "skipped" in trouble["text"] and end["text"].endswith("finished at step 3; success 84 %")
    assert len((tmp_path / ALERTS_FILE).read_text().splitlines()) == 3


def test_a_variable_that_is_missing_is_a_warning(
    tmp_path: pathlib.Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = state_config(tmp_path, logging__alerts__webhook_variable="LAB_WEBHOOK")
    [missing] = [w for w in validate_config(config).warnings if "LAB_WEBHOOK" in w]
    assert "no variable LAB_WEBHOOK" in missing
    monkeypatch.setenv("LAB_WEBHOOK", receiver.url)
    assert not [w for w in validate_config(config).warnings if "LAB_WEBHOOK" in w]


def test_a_command_gets_the_alert(tmp_path: pathlib.Path) -> None:
    written, script = tmp_path / "written", "import sys; open(sys.argv[1], 'w').write(sys.argv[2] + sys.stdin.read())"
    command = [sys.executable, "-c", script, str(written), "{title}; rm -rf $HOME|"]
    sender = Alerts(state_config(tmp_path, logging__alerts__command=command), tmp_path)
    sender.send(TROUBLE)
    sender.close()
    title, _, message = written.read_text().partition("|")
    assert title == "debug/default: q_divergence; rm -rf $HOME"  # no shell has read it
    assert json.loads(message)["text"] == "debug/default: q_divergence: Q is 400"


@pytest.mark.parametrize(
    ("status", "reason"), [(500, "HTTP status 500"), (302, "HTTP status 302"), (None, "no answer within 0.2 s")]
)
def test_a_webhook_that_fails_is_one_warning_without_its_url(
    tmp_path: pathlib.Path,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int | None,
    reason: str,
) -> None:
    if status is None:
        monkeypatch.setattr(alerts, "TIMEOUT_S", 0.2)
    receiver.status = status
    monkeypatch.setenv("LAB_WEBHOOK", receiver.url)
    sender = Alerts(state_config(tmp_path, logging__alerts__webhook_variable="LAB_WEBHOOK"), tmp_path)
    with caplog.at_level(logging.WARNING):
        sender.send(TROUBLE)
        sender.close()
    [record] = caplog.records
    assert record.getMessage() == f"the alert 'debug/default: q_divergence' did not reach the webhook ({reason})"


def test_a_command_that_fails_or_hangs_is_one_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for command in (["ls", "/no such/file"], ["sleep", "600"]):
        if command[0] == "sleep":
            monkeypatch.setattr(alerts, "TIMEOUT_S", 0.2)
        sender = Alerts(state_config(tmp_path, logging__alerts__command=command), tmp_path)
        sender.send(TROUBLE)
        sender.close()
    failed, hung = (record.getMessage() for record in caplog.records)
    assert "did not reach the command (exit code 2: " in failed and "no answer within 0.2 s" in hung


def test_the_same_trouble_is_told_again_after_a_while(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(alerts.time, "time", lambda: now)
    sender = Alerts(state_config(tmp_path, logging__alerts__repeat_after_s=60.0), tmp_path)
    assert sender.is_new(TROUBLE)
    sender.send(TROUBLE)
    now += 59
    assert not sender.is_new(TROUBLE)
    assert sender.is_new(Alert("loss_explosion", "error", 31, "")) and sender.is_new(Alert("finished", "info", 31, ""))
    assert not Alerts(state_config(tmp_path, logging__alerts__repeat_after_s=60.0), tmp_path).is_new(TROUBLE)
    now += 1
    assert sender.is_new(TROUBLE)
    now = 10.0  # the clock was wrong before
    assert sender.is_new(TROUBLE)
    (tmp_path / ALERTS_FILE).write_text("{broken\n")
    assert Alerts(state_config(tmp_path), tmp_path).is_new(TROUBLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logging__alerts__webhook_variable": "LAB_WEBHOOK"}, "the value of LAB_WEBHOOK must begin with https://"),
        ({"logging__alerts__wandb": True}, "logging.alerts.wandb needs Weights & Biases"),
        ({"logging__alerts__command": ["no-such-program"]}, "there is no program 'no-such-program'"),
    ],
)
def test_receivers_that_cannot_work_are_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_WEBHOOK", "ftp://somewhere")
    errors = validate_config(state_config(tmp_path, **changes), ready_to_train=True).errors
    assert any(message in error for error in errors), errors
