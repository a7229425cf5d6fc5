"""Attribution of a value that is not finite to a document. A wrong name sends users to a sound document."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.train.diagnosis import _chunks_of
from tests.support.batches import make_path
from tests.support.tiny_run import TinyRun


@pytest.mark.parametrize("objective", ["mlm", "sop", "permutation"])
def test_a_position_is_of_the_document_that_lies_there(tiny_run: TinyRun, objective: str) -> None:
    """With all additions of objectives to the buffer: at the first and the last token of each sequence, and at
    predicted ones."""
    path = make_path(read_run(tiny_run(f"objective={{name: {objective}}}")))
    *_, plan = islice(path.planned.planner, 4)
    plan = replace(plan, microbatch_rows=plan.num_rows)
    (batch,) = path.maker.microbatches(plan.rows, plan)
    rows = plan.rows
    assert sum(len(row) for row in rows) > 6
    packed, positions_M = batch.packed, batch.targets["positions_M"]
    firsts = (packed.position_ids_T == 0).nonzero().flatten().tolist()
    words = packed.input_ids_T[firsts] == packed.input_ids_T[0]  # [CLS]
    starts = [at for at, is_text in zip(firsts, words.tolist(), strict=True) if is_text]
    chunks = [chunk for row in rows for chunk in row]
    boundaries = packed.cu_seqlens_S.tolist()
    for start, chunk in zip(starts, chunks, strict=True):
        end = min(at for at in boundaries if at > start)
        for at in (start, end - 1):
            hidden_TD = torch.zeros(len(packed.input_ids_T), 2)
            hidden_TD[at, 1] = torch.nan
            assert _chunks_of(hidden_TD, batch, rows, plan) == [chunk]
        own = ((positions_M >= start) & (positions_M < end) & (positions_M > 0)).nonzero().flatten().tolist()
        for index in own[:1]:
            logits_M = torch.zeros(len(positions_M), 1)
            logits_M[index] = torch.inf
            assert _chunks_of(logits_M, batch, rows, plan) == [chunk]
            part = slice(index, index + 2)  # the decoder is called on some positions at a time
            assert _chunks_of(logits_M[part], batch, rows, plan, before=index) == [chunk]
