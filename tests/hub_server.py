"""A Hub on this machine's loopback, with what huggingface_hub asks of the real one for a download."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit_of(files: Files) -> str:
    """40 hex digits that stand for a state of a repository."""
    parts = [name.encode() + b"\0" + hashlib.sha256(files[name]).digest() for name in sorted(files)]
    return hashlib.sha1(b"".join(parts)).hexdigest()


@dataclass
class Hub:
    """The state of the server, which a test may change while it runs.

    Attributes:
        repositories: model id → revision → files.
        gated: model ids that answer 403.
        cut: file names whose content breaks off in the middle.
        slow: file names whose content comes in drops, for longer than a test waits.
        status: answered to everything, if not None.
        requests: method and path of everything that was asked for.
    """

    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    status: int | None = None
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def files(self, name: str, revision: str) -> Files | None:
        revisions = self.repositories[name]
        return revisions.get(revision) or next((f for f in revisions.values() if commit_of(f) == revision), None)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if hub.status is not None:
                return self.answer(b"", hub.status)
            api, parts = path.startswith("/api/models/"), path.removeprefix("/api/models/").strip("/").split("/", 3)
            name, kind, rest = "/".join(parts[:2]), *[*parts[2:], "", ""][:2]
            if name in hub.gated:
                return self.answer(b"", 403, X_Error_Code="GatedRepo")
            if name not in hub.repositories:
                # As the real one does, lest it tell which private models exist.
                return self.answer(b"", 401, X_Error_Code="RepoNotFound")
            revision, _, file = ("main", "", "") if not kind else (rest, "", "") if api else rest.partition("/")
            files = hub.files(name, revision)
            if files is None:
                return self.answer(b"", 404, X_Error_Code="RevisionNotFound")
            if not api:
                return self.send_file(file, files)
            if kind == "tree":
                tree = [{"type": "file", "path": p, "size": len(b), "oid": etag(b)} for p, b in files.items()]
                return self.answer(json.dumps(tree).encode())
            info = {"id": name, "sha": commit_of(files), "siblings": [{"rfilename": path} for path in files]}
            return self.answer(json.dumps(info).encode())

        def send_file(self, name: str, files: Files) -> None:
            body = files[name]
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("ETag", f'"{etag(body)}"')
            self.send_header("X-Repo-Commit", commit_of(files))
            self.send_header("Content-Length", str(len(body) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            half = len(body) // 2
            if name in hub.slow:
                for i in range(first, half, max(1, half // 600)):
                    self.wfile.write(body[i : i + half // 600])
                    self.wfile.flush()
                    time.sleep(0.05)
            # Closing the connection before the promised length is what a broken network looks like.
            self.wfile.write(body[first : half if name in hub.cut | hub.slow else None])

    return Handler


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass  # a client that went away in the middle: that is what some tests do


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Runs the server; `hub.endpoint` says where."""
    with _Server(("127.0.0.1", 0), _handler(hub)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
