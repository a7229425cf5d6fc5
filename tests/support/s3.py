"""A real S3 API on loopback, moto's server, that counts requests and can be made to fail."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

BUCKET = "shards"
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Store:
    """The server, in threads of this process.

    Attributes:
        downloads: number of requests for each object, by key.
        fault: None, or the fault of a GET of an object: "hang", "drop" (the connection, in the middle of the
            body), "busy" (503).
        faulty_method: "GET", or "PUT" for "hang" and "busy" where objects are written.
        faults_left: number of further requests with the fault.
    """

    def __init__(self) -> None:
        from boto3.session import Session
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto: Application = DomainDispatcherApplication(create_backend_app)
        self.downloads: Counter[str] = Counter()
        self.fault: str | None = None
        self.faulty_method = "GET"
        self.faults_left = 0
        self._ended = threading.Event()
        self.start(0)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self._client: Any = Session().client("s3", endpoint_url=self.url, **keys)
        self._client.create_bucket(Bucket=BUCKET)

    def start(self, port: int) -> None:
        from werkzeug.serving import make_server

        self._ended.clear()
        self._server = make_server("127.0.0.1", port, self._answer, threaded=True)
        self.port: int = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop the server; stored objects stay for another start."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def is_the_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That s3:// means, in this process and those that it starts."""
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_EC2_METADATA_DISABLED": "true", "S3_ENDPOINT_URL": self.url}.items():
            monkeypatch.setenv(name, value)

    def upload(self, folder: Path, name: str) -> str:
        """Store the files of a folder and its subfolders; returns its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{name}"

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        self.downloads[key] -= 1
        return content

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def allow_anyone(self, anyone: bool) -> None:
        """Accept any credentials, as moto does by itself, or only such as IAM knows, and it knows none."""
        from urllib.request import Request, urlopen

        count = b"1000000000" if anyone else b"0"
        request = Request(f"{self.url}/moto-api/reset-auth", data=count, headers={"Content-Type": "text/plain"})
        urlopen(request, timeout=10).read()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        bucket, _, key = environ["PATH_INFO"].strip("/").partition("/")
        if bucket != BUCKET or not key:
            return self._moto(environ, start_response)
        self.downloads[key] += environ["REQUEST_METHOD"] == "GET"
        if environ["REQUEST_METHOD"] != self.faulty_method or self.fault is None or self.faults_left <= 0:
            return self._moto(environ, start_response)
        self.faults_left -= 1
        if self.fault == "hang":
            self._ended.wait(60)
        if self.fault in ("busy", "hang"):
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        body = b"".join(self._moto(environ, start_response))
        return [body[: len(body) // 2]]  # the length was promised for the whole
