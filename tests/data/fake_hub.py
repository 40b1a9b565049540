"""The part of the Hugging Face hub that a dataset download uses, on the loopback interface."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves one dataset directory as `repo_id`; every other repository is unknown."""

    def __init__(self, repo_id: str, root: Path) -> None:
        self.repo_id, self.root = repo_id, root
        self.downloaded: list[str] = []

    def __enter__(self) -> "FakeHub":
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _files(self) -> dict[str, int]:
        """Name -> size."""
        found = sorted(file for file in self.root.rglob("*") if file.is_file())
        return {file.relative_to(self.root).as_posix(): file.stat().st_size for file in found}

    def answer(self, request: http.server.BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.partition("?")[0]
        files = f"/datasets/{self.repo_id}/resolve/{COMMIT}/"
        headers = {"X-Repo-Commit": COMMIT}
        api = f"/api/datasets/{self.repo_id}"
        if path == f"{api}/revision/main":
            siblings = [{"rfilename": name} for name in self._files()]  # older clients look here
            content = json.dumps({"id": self.repo_id, "sha": COMMIT, "siblings": siblings}).encode()
            status = 200
        elif path == f"{api}/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": size, "oid": ""} for name, size in self._files().items()]
            content, status = json.dumps(tree).encode(), 200
        elif path.startswith(files):
            content = (self.root / path.removeprefix(files)).read_bytes()
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            status = 200
            if body:
                self.downloaded.append(path.removeprefix(files))
        else:
            content, status = b'{"error": "Repository not found"}', 404
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)
