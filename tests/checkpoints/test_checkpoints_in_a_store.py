"""`checkpoints` with a replica in a real S3 API: copied, listed, verified, rolled back, restored.

If this breaks, the store undoes a rollback at the next start, or a damaged copy is called verified.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.checkpoints.replica import fetch_newest, store_of
from tests.checkpoints.tools.small_run import SmallRun
from tests.support.runs import newest
from tests.support.s3 import BUCKET, Store
from tests.support.store import server, store

pytest.importorskip("s3fs", reason="needs s3fs, which the pinned environment has")
pytestmark = [pytest.mark.timeout(120), pytest.mark.runs]
__all__ = ["server", "store"]  # fixtures


@pytest.mark.slow
def test_copied_listed_rolled_back_and_brought_back(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, url = SmallRun(tmp_path, capsys), f"s3://{BUCKET}/verb"
    run.copy(*run.steps(), url=url)
    settings = replace(run.config.checkpoint, copy_to=url, copy_timeout_seconds=20.0)
    run.set_config(replace(run.config, checkpoint=settings))
    shutil.rmtree(run.at(100))
    said = run.says("list", run.folder)
    assert said.count(" yes ") == 5 and "replica only" in said
    assert run.says("verify", run.folder, "--copies").count(": valid") == 5

    run.flip(300)
    said = run.says("restore", run.folder, "300")
    assert "was brought back from s3://" in said and said.count("is set aside in s3://") == 2
    there = store_of(run.config.checkpoint, run.config.name)
    assert there is not None and there.steps().keys() == {100, 200, 300}
    fetch_newest(run.config.checkpoint, Path(run.config.folder), print)
    assert newest(run.folder).step == 300

    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")  # no server listens there
    run.set_config(replace(run.config, checkpoint=replace(settings, copy_timeout_seconds=2.0)))
    before = run.bytes()
    assert "cannot be read" in run.says("list", run.folder)
    assert "nothing was changed" in run.says("restore", run.folder, "200", code=74)
    assert run.bytes() == before
