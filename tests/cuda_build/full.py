"""`tune` where the run's microbatch does not fit in memory: python -m tests.cuda_build.full FOLDER.

The allocator that says so is torch's own. Prints the table's rows, the settings and the last lines, as JSON. No
question is begun, and so nothing else is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from modernbert_train.__main__ import read_run
from modernbert_train.plan.tuned import SETTINGS, read_tuned
from modernbert_train.train.tune.findings import TABLE
from modernbert_train.train.tune.session import tune
from tests.conftest import TINY_YAML, make_tiny_data


def main(folder: Path) -> None:
    make_tiny_data(folder / "data")
    file = folder / "full.yaml"
    file.write_text(TINY_YAML.format(runs=folder / "runs", data=folder / "data"), encoding="utf-8")
    words = [
        *(str(file), "compute.device=cuda", "compute.precision=bf16", "data.validation=null", "data.num_workers=0"),
        *("phases.long=null", "phases.short.batch_warmup=null", "phases.short.batch_rows=512"),
        *("phases.short.microbatch_tokens=32768", "phases.short.tokens=200000"),
        *("model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=192"),
    ]
    found = tune(read_run(words), minutes=0)
    report = json.loads((found / TABLE).read_text())
    settings = dict(read_tuned(found / SETTINGS).settings)
    print(json.dumps({"rows": report["rows"], "settings": settings, "advice": report["advice"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
