"""A Hugging Face hub on the loopback interface: what huggingface_hub needs to create, upload, tag and download.

Contents are kept in memory. Files are uploaded inside the commit, as the hub wants it for small files.
"""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_writes"


class Repository:
    """The states of a repository; a commit is named by its number."""

    def __init__(self) -> None:
        self.states: list[dict[str, bytes]] = [{".gitattributes": b""}]
        self.tags: dict[str, str] = {}
        self.is_private = False

    def commit(self, content: dict[str, bytes]) -> str:
        self.states.append(content)
        return self.head

    @property
    def head(self) -> str:
        return f"{len(self.states) - 1:040x}"

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit."""
        if revision == "main":
            return self.head
        if revision in self.tags:
            return self.tags[revision]
        is_commit = len(revision) == 40 and int(revision, 16) < len(self.states)
        return revision if is_commit else None

    def files(self, commit: str) -> dict[str, bytes]:
        return self.states[int(commit, 16)]


class LocalHub:
    """`repositories` by kind ("models", "datasets") and name; everybody may read what is not private."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.downloaded: list[str] = []
        self.unavailable: set[str] = set()  # files that are listed and not given out

    def add(self, kind: str, repo_id: str, root: Path) -> Repository:
        """A repository with the files of a directory."""
        repository = self.repositories.setdefault((kind, repo_id), Repository())
        found = (path for path in root.rglob("*") if path.is_file())
        repository.commit({path.relative_to(root).as_posix(): path.read_bytes() for path in found})
        return repository

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Settings of a process whose hub this one is."""
        settings = {"HF_HOME": str(home), "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
        return settings | ({} if token is None else {"HF_TOKEN": token})

    def __enter__(self) -> "LocalHub":
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815, the names of http.server
            do_POST = do_GET  # noqa: N815
            do_DELETE = do_GET  # noqa: N815

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        names = [unquote(name) for name in parts.path.strip("/").split("/")]
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        headers: dict[str, str] = {}
        if token not in ("", TOKEN):
            status, content = 401, b'{"error": "Invalid credentials in Authorization header"}'
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
        elif names[0] == "api":
            method = "GET" if request.command == "HEAD" else request.command
            status, found, headers = self._api(method, names[1:], parse_qs(parts.query), body, token)
            content = json.dumps(found).encode()
        else:
            status, content, headers = self._file(request.command, names, token)
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _api(
        self, method: str, names: list[str], query: Mapping[str, list[str]], body: bytes, token: str
    ) -> tuple[int, Any, dict[str, str]]:
        if names == ["validate-yaml"]:  # the head of a card
            return 200, {"errors": [], "warnings": []}, {}
        if len(names) < 3 and names != ["repos", "create"]:
            return 404, {}, {}
        if names == ["repos", "create"]:
            return self._create(json.loads(body), token)
        kind, repo_id, *rest = names[0], "/".join(names[1:3]), *names[3:]
        repository = self._readable(kind, repo_id, token)
        if repository is None:
            return _missing("RepoNotFound", "Repository not found")
        action, revision = (*rest, None, None)[:2]
        if method != "GET" and token != TOKEN:
            return 403, {"error": "this token may not write"}, {}
        if action == "refs":
            tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": x} for tag, x in repository.tags.items()]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.head}
            return 200, {"branches": [main], "converts": [], "tags": tags}, {}
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]
            return 200, {"files": modes}, {}
        if action == "commit":
            return 200, self._commit(repository, kind, repo_id, body), {}
        if action == "tag":
            if method == "DELETE":
                del repository.tags[str(revision)]
                return 200, {}, {}
            repository.tags[json.loads(body)["tag"]] = repository.head
            return 200, {}, {}
        commit = repository.resolve(revision or "main")
        if commit is None:
            return _missing("RevisionNotFound", "Invalid rev id")
        found = repository.files(commit)
        if action == "tree":
            tree = [{"type": "file", "path": n, "size": len(c), "oid": git_id(c)} for n, c in found.items()]
            return 200, tree, {}
        siblings = [{"rfilename": name} for name in found]
        return 200, {"id": repo_id, "sha": commit, "private": repository.is_private, "siblings": siblings}, {}

    def _create(self, wish: Mapping[str, Any], token: str) -> tuple[int, Any, dict[str, str]]:
        if token != TOKEN:
            return 401, {"error": "log in"}, {}
        kind, repo_id = f"{wish.get('type') or 'model'}s", f"{wish.get('organization') or 'someone'}/{wish['name']}"
        url = f"{self.url}/{'datasets/' if kind == 'datasets' else ''}{repo_id}"
        if (kind, repo_id) in self.repositories:
            return 409, {"error": "You already created this repo", "url": url}, {}
        self.repositories[kind, repo_id] = Repository()
        self.repositories[kind, repo_id].is_private = bool(wish.get("private")) or wish.get("visibility") == "private"
        return 200, {"url": url, "name": repo_id}, {}

    def _commit(self, repository: Repository, kind: str, repo_id: str, body: bytes) -> dict[str, Any]:
        files = dict(repository.files(repository.head))
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                del files[entry["value"]["path"]]
        prefix = "datasets/" if kind == "datasets" else ""
        commit = repository.commit(files)
        return {"commitUrl": f"{self.url}/{prefix}{repo_id}/commit/{commit}", "commitOid": commit, "success": True}

    def _file(self, command: str, names: list[str], token: str) -> tuple[int, bytes, dict[str, str]]:
        kind = names.pop(0) if names[0] == "datasets" else "models"
        repository = self._readable(kind, "/".join(names[:2]), token)
        commit = None if repository is None else repository.resolve(names[3])
        name = "/".join(names[4:])
        if repository is None or commit is None or name not in repository.files(commit):
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        if name in self.unavailable:
            return 403, b"", {}
        content = repository.files(commit)[name]
        if command == "GET":
            self.downloaded.append(name)
        return 200, content, {"X-Repo-Commit": commit, "ETag": f'"{git_id(content)}"'}

    def _readable(self, kind: str, repo_id: str, token: str) -> Repository | None:
        repository = self.repositories.get((kind, repo_id))
        return None if repository is None or (repository.is_private and token != TOKEN) else repository


def git_id(content: bytes) -> str:
    """git's name of a file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _missing(code: str, message: str) -> tuple[int, Any, dict[str, str]]:
    return 404, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message}
