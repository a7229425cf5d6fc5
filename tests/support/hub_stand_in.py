"""A local stand-in for the hub that keeps models in memory, with the interface that uploading needs."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from werkzeug import Request, Response
from werkzeug.serving import make_server


class StandIn:
    """Its models: id -> branch -> files.

    Attributes:
        datasets: id -> files, for downloads.
        commits: branch of each commit, in order.
        refuses: answer all writes with this code; 0: accept them.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.refuses = 0
        self.fails_after: int | None = None
        self.address = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if self.refuses and method == "POST":
            return self.refuses, {}, b'{"error": "not yours"}'
        if parts == ["api", "validate-yaml"]:  # for a card
            return 200, {}, b'{"errors": [], "warnings": []}'
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            if name in self.models:
                return 409, {}, json.dumps({"url": f"{self.address}/{name}"}).encode()
            self.models[name] = {"main": {".gitattributes": b""}}
            self.private[name] = asked.get("visibility") == "private"
            return 200, {}, json.dumps({"url": f"{self.address}/{name}", "name": name}).encode()
        if parts[:2] == ["api", "models"]:
            return self._model("/".join(parts[2:4]), parts[4:], method, body)
        if parts[:2] == ["api", "datasets"]:
            name, files = "/".join(parts[2:4]), self.datasets["/".join(parts[2:4])]
            tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
            about = {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]}
            return 200, {}, json.dumps(tree if parts[4:5] == ["tree"] else about).encode()
        is_dataset = parts[0] == "datasets"
        parts = [*parts[is_dataset:], "", "", "", ""]
        name, revision = "/".join(parts[:2]), parts[3]
        model = {revision: self.datasets[name]} if is_dataset else self.models.get(name, {})
        if revision not in model:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        file = model[revision].get("/".join(filter(None, parts[4:])))
        if file is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40}, b""
        etag = hashlib.sha1(file).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": etag}, file

    def _model(self, name: str, words: list[str], method: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        model = self.models.get(name)
        if model is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        kind, revision = [*words, "", ""][:2]
        if kind == "branch":
            if revision in model:
                return 409, {}, b"{}"
            model[revision] = dict(model["main"])
            return 200, {}, b"{}"
        if kind == "preupload":
            files = json.loads(body)["files"]
            told = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            return 200, {}, json.dumps({"files": told}).encode()
        if kind == "commit":
            if self.fails_after is not None and len(self.commits) >= self.fails_after:
                return 500, {}, b'{"error": "a fault of the hub"}'
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    model[revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.commits.append(revision)
            told_of = {"success": True, "commitUrl": f"{self.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
            return 200, {}, json.dumps(told_of).encode()
        about = {"id": name, "sha": "0" * 40, "siblings": [], "private": self.private[name]}
        return 200, {}, json.dumps(about).encode()


@contextmanager
def running() -> Iterator[StandIn]:
    """Run a stand-in that listens on `address` inside this context."""
    hub = StandIn()

    @Request.application
    def application(request: Request) -> Response:
        code, headers, content = hub.answer(request.method, request.environ["REQUEST_URI"], request.get_data())
        return Response(content, code, headers)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
