"""The served page: sends only new data of the runs, and answers only this machine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.report.document import Known
from modernbert_train.report.serve import Server, Watch, open_server, parse_known
from tests.report.records import resume, step, validation
from tests.support.report_page import run, sample


def add(folder: Path, *records: dict[str, Any], tail: str = "") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in records) + tail)


def ask(watch: Watch, known: list[Known]) -> dict[int, dict[str, Any]]:
    """Return the new data by number of the run, and add it to `known`."""
    found: dict[int, dict[str, Any]] = dict(watch.changes(known)["runs"])
    for number, changes in found.items():
        known[number : number + 1] = [Known(*changes["known"])]
    return found


def test_only_what_is_new_is_handed_out(tmp_path: Path) -> None:
    """Otherwise a hundred runs would be sent whole every few seconds."""
    one = run(tmp_path / "runs/a", *(step(i) for i in range(1, 41)))
    watch, known = Watch([tmp_path / "runs"]), []
    assert len(ask(watch, known)[0]["columns"]["step"]) == 40
    assert ask(watch, known) == {}
    add(one, step(41), validation(41), tail='{"kind": "st')
    found = ask(watch, known)[0]
    assert found["first"] == 40 and found["columns"]["step"] == [41] and found["curves"][0]["value"] == [2.5]
    assert found["warnings"] == []  # a partial line is normal while the run trains
    assert ask(watch, known) == {}


def test_a_run_that_goes_back_is_handed_out_whole(tmp_path: Path) -> None:
    one = run(tmp_path / "runs/a", *(step(i) for i in range(1, 41)))
    watch, known = Watch([one]), []
    ask(watch, known)
    add(one, resume(20), step(21, 1.0))
    found = ask(watch, known)[0]
    assert found["first"] == 0 and found["columns"]["step"] == list(range(1, 22)) and found["events"][0][0] == "restart"


@pytest.mark.runs
def test_a_long_run_is_chosen_again_only_now_and_then(tmp_path: Path) -> None:
    one = run(tmp_path / "runs/a", *(step(i) for i in range(1, 3001)))
    watch, known = Watch([one]), []
    assert len(ask(watch, known)[0]["columns"]["step"]) <= 2020
    add(one, *(step(i) for i in range(3001, 3101)))
    found = ask(watch, known)[0]
    assert found["first"] > 0 and found["columns"]["step"] == list(range(3001, 3101))
    add(one, *(step(i) for i in range(3101, 6001)))
    found = ask(watch, known)[0]
    assert found["first"] == 0 and len(found["columns"]["step"]) <= 2020


def test_new_runs_join_and_one_that_has_not_begun_is_no_error(tmp_path: Path) -> None:
    run(tmp_path / "runs/b", step(1))
    watch, known = Watch([tmp_path / "runs"]), []
    assert [each["name"] for each in ask(watch, known).values()] == ["b"]
    new = run(tmp_path / "runs/a", step(1))
    (new / "metrics.jsonl").unlink()
    (tmp_path / "runs/other").mkdir()
    joined = ask(watch, known)
    assert list(joined) == [1] and joined[1]["name"] == "a" and joined[1]["columns"] == {}
    add(new, step(1))
    (new / "samples.jsonl").write_text(json.dumps(sample(1)) + "\n")
    later = ask(watch, known)[1]
    assert later["columns"]["step"] == [1] and later["samples"][0]["step"] == 1


def test_a_folder_of_anything_never_ends_it(tmp_path: Path) -> None:
    one = run(tmp_path / "runs/a", step(1))
    (one / "metrics.jsonl").write_bytes(bytes(range(256)) * 10 + b"\n" + json.dumps(step(1)).encode() + b"\n")
    for name in ("config.yaml", "samples.jsonl", "starts.jsonl", "faults.jsonl", "evaluations.jsonl"):
        (one / name).write_bytes(b"\xff{[\n" * 3)
    found = ask(Watch([tmp_path / "runs"]), [])[0]
    assert found["columns"]["step"] == [1] and found["warnings"]


def test_what_a_page_says_it_knows_may_be_anything() -> None:
    assert parse_known("1.2.3,,x.1.2,1.2,-1.0.0,9.9.9") == [Known(1, 2, 3), *[Known()] * 4, Known(9, 9, 9)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    run(tmp_path / "runs/a", step(1))
    with open_server([tmp_path / "runs"], port=0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join(10)


def request(server: Server, method: str, path: str, body: str = "", host: str | None = None) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, body, {"Host": host} if host else {})
    answer = connection.getresponse()
    found = (answer.status, answer.read().decode(), answer.headers)
    connection.close()
    return found


def test_the_page_asks_its_own_server_alone(server: Server) -> None:
    status, page, headers = request(server, "GET", "/")
    assert status == 200 and '"live":true' in page and "connect-src 'self'" in page
    assert (
        headers["Content-Security-Policy"].startswith("default-src 'none'") and headers["Cache-Control"] == "no-store"
    )
    status, text, _ = request(server, "POST", "/data.json", "")
    assert status == 200 and json.loads(text)["runs"][0][1]["name"] == "a"
    assert request(server, "GET", "/../../etc/passwd")[0] == 404
    assert request(server, "POST", "/data.json", "0" * 70_000)[0] == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("evil.example:8421", 403)],
)
def test_a_name_of_another_machine_is_refused(server: Server, host: str, status: int) -> None:
    """A website whose name is resolved to 127.0.0.1 could otherwise read the page through the visitor's browser."""
    assert request(server, "GET", "/", host=host)[0] == status
    assert request(server, "POST", "/data.json", host=host)[0] == status


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", "--serve", str(tmp_path), "--port", str(port)]) == 78
    assert f"--port {port}: cannot listen there" in capsys.readouterr().err
    assert main(["report", "--serve", str(tmp_path / "nothing")]) == 78
    assert "no such folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--port", "1"]) == 78
    assert main(["report", "--serve", str(tmp_path), "--out", "x.html"]) == 78


@pytest.mark.runs
def test_ctrl_c_ends_it_with_a_code_and_without_a_traceback(tmp_path: Path) -> None:
    run(tmp_path / "runs/a", step(1))
    command = [sys.executable, "-m", "modernbert_train", "report", "--serve", str(tmp_path / "runs"), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and "Traceback" not in said
