"""Messages that reach a person: trouble that begins in a run, and how the run ends.

A thread delivers them, so that a slow receiver never holds the run up, and whatever goes wrong is one warning.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import queue
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from acrlpd.config import RLTrainConfig
from acrlpd.config.run import AlertsConfig
from acrlpd.files import JsonLinesFile

logger = logging.getLogger(__name__)

# What was sent, in the run directory. A run that is started again remembers by this file what was sent before.
ALERTS_FILE = "alerts.jsonl"
# A receiver that has not answered after this time is given up.
TIMEOUT_S = 10.0
# At its end a run waits so long for alerts that are not delivered yet.
CLOSE_S = 15.0
_MOST_WAITING = 32

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Alert:
    """What a person should know."""

    kind: str  # of an anomaly, or "finished", "stopped", "failed"
    severity: str  # "info", "warning" or "error"
    step: int
    text: str


class Alerts:
    """Sends the alerts of one run to the receivers of its config, apart from Weights & Biases."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path) -> None:
        """Only the primary process of a run sends alerts."""
        config = rl_config.logging.alerts
        self._run = f"{rl_config.name}/{rl_config.exp_name}"
        self._directory = directory
        self._repeat_after_s = config.repeat_after_s
        self._receivers = _receivers(config)
        self._file = JsonLinesFile(directory / ALERTS_FILE)
        self._sent: dict[str, float] | None = None  # kind -> time; read from the file when it is first needed
        self._waiting: queue.Queue[Message | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def title(self, alert: Alert) -> str:
        return f"{self._run}: {alert.kind}"

    def is_new(self, alert: Alert) -> bool:
        """Whether to send this alert: the same kind of trouble is not sent again and again."""
        if self._sent is None:
            self._sent = self._read()
        if alert.severity == "info" or alert.kind not in self._sent:
            return True
        age = time.time() - self._sent[alert.kind]
        return age < 0 or age >= self._repeat_after_s  # a clock that was set back must not silence a run

    def send(self, alert: Alert) -> None:
        """Remembers the alert, and hands it to the thread that delivers it."""
        self._sent = (self._sent or {}) | {alert.kind: time.time()}
        self._file.append({"time": time.time(), **dataclasses.asdict(alert)})
        if not self._receivers:
            return
        message = {
            "title": self.title(alert),
            **dataclasses.asdict(alert),
            "text": f"{self.title(alert)}: {alert.text}",
            "run": self._run,
            "directory": str(self._directory),
            "host": socket.gethostname(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            logger.warning("the alert %r is not sent: %d others wait already", message["title"], _MOST_WAITING)

    def _read(self) -> dict[str, float]:
        """When each kind was sent last. A file that cannot be read costs an alert too many, never the run."""
        try:
            return {str(entry["kind"]): float(entry["time"]) for entry in self._file.read()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s); alerts may be sent twice", self._directory / ALERTS_FILE, error)
            return {}

    def close(self) -> None:
        """Waits a little for alerts that are not delivered yet."""
        if self._thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning("some alerts could not be sent within %g s; the run ends without them", CLOSE_S)
        self._thread = None

    def _deliver(self) -> None:
        while (message := self._waiting.get()) is not None:
            for name, receive in self._receivers.items():
                try:
                    receive(message)
                except Exception as error:  # networks and the programs of others fail in many ways
                    logger.warning("the alert %r did not reach the %s (%s)", message["title"], name, _reason(error))


def _receivers(config: AlertsConfig) -> dict[str, Callable[[Message], None]]:
    receivers: dict[str, Callable[[Message], None]] = {}
    url = None if config.webhook_variable is None else os.environ.get(config.webhook_variable)
    if url:
        receivers["webhook"] = lambda message: post(url, message)
    if config.command:
        receivers["command"] = lambda message: run_command(config.command, message)
    return receivers


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A message that is posted must not be turned into the request of another page."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, message: Message) -> None:
    """Sends a message as JSON to a webhook."""
    request = urllib.request.Request(
        url, json.dumps(message).encode(), {"Content-Type": "application/json", "User-Agent": "acrlpd"}
    )
    with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S):
        pass


def run_command(command: tuple[str, ...], message: Message) -> None:
    """Runs a command, without a shell: {title} and {text} stand for the message, standard input is its JSON."""
    arguments = [part.replace("{title}", message["title"]).replace("{text}", message["text"]) for part in command]
    subprocess.run(
        arguments,
        input=json.dumps(message).encode() + b"\n",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
        start_new_session=True,  # Ctrl-C ends the run, and the command has to tell about it
    )


def _reason(error: Exception) -> str:
    """Why an alert was not delivered, in one line and without the URL, which may be a secret."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return f"exit code {error.returncode}{f': {said[-1]}' if said else ''}"
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    if isinstance(getattr(error, "reason", error), subprocess.TimeoutExpired | TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return type(error).__name__
