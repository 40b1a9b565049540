"""`acrlpd serve` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType


class ServeProcess:
    """Runs until it is told to stop; `lines` is what it has said so far."""

    def __init__(self, cache: Path, *args: str | Path) -> None:
        self._command = [sys.executable, "-m", "acrlpd.cli.main", "serve", *map(str, args), "--port", "0"]
        self._environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
        }
        self.lines: list[str] = []
        self._is_told = False

    def __enter__(self) -> "ServeProcess":
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.wait_for_line(r"serving on wss?://127\.0\.0\.1:(\d+)", seconds=300)
        self.port = int(line.group(1))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        code = self.stop()
        assert kind is not None or code == 0, f"exit code {code}\n{self.said}"

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def terminate(self) -> None:
        """Sends SIGTERM once: a second one would end a server that is about to leave, with another exit code."""
        if not self._is_told:
            self._is_told = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        if self._process.poll() is None:
            self.terminate()
        try:
            code = self._process.wait(300)
        finally:
            self._process.kill()
            self._process.wait()
        self._reader.join(120)
        return code

    def wait_for_line(self, pattern: str, seconds: float = 300) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            match = re.search(pattern, self.said)
            if match:
                return match
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        self._process.kill()
        raise AssertionError(f"the server did not say {pattern!r}:\n{self.said}")

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self.lines.append(line)
