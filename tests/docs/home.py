"""A reader's folder for the commands of the documentation, and how a test types them.

The folder has only the repository's `yamls/` and forty short texts in `my/texts`: a command's inputs must come from a
command before it, or from PREPARED, which makes the files that a page assumes. Commands run unchanged, except for
SMALLER, which makes models and runs small.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import yaml
from tokenizers import Tokenizer, models

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.vocabulary import read_vocabulary
from tests.support import forked, layouts
from tests.support.configurations import THEIRS
from tests.support.make_shards import make_documents, make_texts
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.reference_checkpoint import write_reference_checkpoint
from tests.support.small_checkpoint import sign
from tests.support.tiny_run import RANK_VARIABLES

WIDTH = "model.hidden_size=64 model.num_layers=4 model.num_heads=1 model.intermediate_size=96"
FEW = (
    f"{WIDTH} data.num_workers=0 eval.max_tokens=2_000 checkpoint.interval_tokens=1_500 "
    "'phases.stable={tokens: 16_000, batch_warmup: {tokens: 4_000}, schedule: {warmup_tokens: 2_000}}' "
    "phases.context.tokens=4_000 'phases.decay={tokens: 8_000, schedule: {decay_tokens: 8_000}}'"
)
LARGER = "model.vocab_size=8192 model.hidden_size=128 model.num_layers=7 model.num_heads=2 model.intermediate_size=128"
ONE_TRIAL = (
    "trials=1 'prune={name: none, interval_tokens: null, min_tokens: 0}' "
    f"'overrides=[phases.context=null, phases.decay=null, {WIDTH.replace(' ', ', ')}, data.num_workers=0, "
    "phases.stable.tokens=2_000, phases.stable.batch_warmup=null, phases.stable.schedule.warmup_tokens=0, "
    "eval.max_tokens=2_000]'"
)
# part of a command -> its replacement in the test: the same with less work, on other text
SMALLER = {
    "prepare yamls/data/quickstart.yaml": "prepare yamls/data/quickstart.yaml tokenizer.vocab_size=512 "
    "'sources.stdlib={kind: text, path: my/texts}'",
    "yamls/data/own_text.yaml": "yamls/data/own_text.yaml validation_share=0.2",
    "tokenizer.vocab_size=8192": "tokenizer.vocab_size=512",
    "--entries 50368": "--entries 512",
    "--superbpe 0.8": "--superbpe 0.8 --spare 3",
    "train yamls/recipes/esm2-8m.yaml": "train yamls/recipes/esm2-8m.yaml compute.precision=fp32 data.num_workers=0 "
    "model.hidden_size=40 model.num_layers=2 model.intermediate_size=64 phases.low=null eval.interval_tokens=null "
    "'phases.main={tokens: 4_000, row_tokens: 64, batch_rows: 8, microbatch_tokens: 512, schedule: "
    "{warmup_tokens: 0, decay_tokens: 0}}'",
    "--hours 1": "--size tiny --tokens 20k --yes",
    "--hours 24": "--size tiny --tokens 20k --yes",
    "my/texts --entries 4096": "my/texts --entries 400",
    " train yamls/quickstart.yaml": f" train yamls/quickstart.yaml {FEW}",
    "train yamls/recipes/contrastive.yaml": "train yamls/recipes/contrastive.yaml data.num_workers=0 "
    "phases.masked.tokens=8_000 phases.masked.schedule.warmup_tokens=0 phases.contrastive.tokens=8_000 "
    "'phases.contrastive.schedule={warmup_tokens: 0, decay_tokens: 8_000}'",
    "launch yamls/quickstart.yaml": f"launch yamls/quickstart.yaml {FEW}",
    "train yamls/model/base.yaml mine.yaml": f"train yamls/model/base.yaml mine.yaml model.vocab_size=8192 {WIDTH}",
    "train mine.yaml": f"train mine.yaml model.vocab_size=8192 {WIDTH}",
    "--out runs/names --steps 300": "--out runs/names --steps 3 --hidden-size 16",
    "--label-column intent": "--label-column intent --steps 2",
    "train yamls/model/large.yaml mine.yaml": f"train yamls/model/large.yaml mine.yaml {LARGER}",
}  # fmt: skip


def smaller(text: str) -> str:
    """The command as the test types it."""
    for part, instead in SMALLER.items():
        text = text.replace(part, instead)
    if text.startswith("modernbert-train sweep yamls/sweeps/lr_by_weight_decay.yaml"):
        text += f" {ONE_TRIAL}"
    return text


def type_in(text: str) -> str:
    """Run a command in the present folder, in this process; return its output, which `> FILE` writes instead."""
    name, *words = shlex.split(smaller(text))
    assert name in ("modernbert-train", "python"), text
    if name == "python":
        name, *words = words[words[0] == "-m" :]
    target = None
    if ">" in words:
        at = words.index(">")
        target, words = words[at + 1], words[:at] + words[at + 2 :]
    for variable in RANK_VARIABLES:
        os.environ.pop(variable, None)
    output = io.StringIO()
    with redirect_stdout(output):
        module = name.removesuffix(".py").replace("/", ".").replace("modernbert-train", "modernbert_train.__main__")
        code = importlib.import_module(module).main(words) or 0  # a benchmark's or example's main returns None
    assert code == 0, f"{text}: exit code {code}\n{output.getvalue()}"
    if target is not None:
        Path(target).write_text(output.getvalue(), encoding="utf-8")
    return output.getvalue()


def furnish(folder: Path) -> None:
    """Make a reader's folder."""
    (folder / "yamls").symlink_to(ROOT / "yamls")
    (folder / "my/texts").mkdir(parents=True)
    for number, text in enumerate(make_texts(40)):
        (folder / f"my/texts/{number:02}.txt").write_text(text, encoding="utf-8")
    (folder / "my/queries.txt").write_text("Return the sum.\nWhat does this module do?\n", encoding="utf-8")


# --- files that a page assumes -------------------------------------------------------------------------------------


def as_step(folder: Path, step: int) -> None:
    """Rename a checkpoint to another step, since pages name some."""
    file = folder / "state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    state["step"] = step
    state["training"]["timestamp"] |= {"batch": step, "sample": step}
    file.write_text(json.dumps(state), encoding="utf-8")
    sign(folder, lambda manifest: manifest.update(step=step))
    folder.rename(folder.with_name(f"step-{step:08d}"))


def adopt(home: Path) -> None:
    tokenizer = home / "data/quickstart/tokenizer"
    documents = make_documents(tokenizer, [200] * 100)
    layouts.ettin(home / "their/train", documents, read_vocabulary(tokenizer))
    layouts.write_mds(home / "their/text", {"text": "str"}, [{"text": text} for text in make_texts(40)])


def averaging(home: Path) -> None:
    for name in ("base", "a", "b"):
        shutil.copytree(home / "runs/quickstart", home / f"runs/{name}")
    as_step(max((home / "runs/a/checkpoints").iterdir()), 1000)


def clusters(home: Path) -> None:
    (section,) = (block for block in blocks(ROOT / "docs/clusters.md", "yaml") if block.startswith("launch:"))
    rows = "{batch_rows: 16, batch_warmup: null}"  # for the 16 GPUs of the page's section
    phases = f"phases: {{stable: {rows}, context: {rows}, decay: {rows}}}"
    (home / "RUN.yaml").write_text(f"include: yamls/quickstart.yaml\n{phases}\n{section}", encoding="utf-8")


def data(home: Path) -> None:
    Tokenizer(models.BPE({chr(ord("a") + i): i for i in range(26)}, [])).save(str(home / "olmo.json"))


def use(home: Path) -> None:
    texts = enumerate(make_texts(24))
    rows = ["text,intent", *(f"{text[:60]!r},{'card' if number % 2 else 'fee'}" for number, text in texts)]
    _write_splits(
        home / "my/intents", ("train.csv", "test.csv"), "\n".join(row.replace('"', "") for row in rows) + "\n"
    )


def entities(home: Path) -> None:
    sentences = [f"she\tO\nmet\tO\nAda\tB-per\nin\tO\nRome\tB-loc\n.\tO\nEmma\tB-work\n{n}\tO\n" for n in range(12)]
    _write_splits(home / "my/names", ("train.conll", "dev.conll"), "\n".join(sentences))
    (task,) = blocks(ROOT / "docs/tasks/entities.md", "yaml")
    (home / "my/names.yaml").write_text(task, encoding="utf-8")


def _write_splits(folder: Path, splits: Sequence[str], text: str) -> None:
    folder.mkdir()
    for split in splits:
        (folder / split).write_text(text, encoding="utf-8")


def code(home: Path) -> None:
    shutil.copytree(home / "my/texts", home / "my/code")


def language(home: Path) -> None:
    shutil.copytree(home / "my/texts", home / "my/language")


def fork(
    command: Sequence[str], environment: Mapping[str, str], orphaned: signal.Signals, *, own_session: bool
) -> forked.Popen:
    """Start what `pretrain` starts: the processes are forks of one with their imports."""
    return forked.Popen(command, env=dict(environment), start_new_session=own_session)


def retrieval(home: Path) -> None:
    (recipe,) = blocks(ROOT / "docs/tasks/retrieval.md", "yaml")
    (home / "my/answers.yaml").write_text(recipe, encoding="utf-8")
    texts = [(text[:40], text[40:90]) for text in make_texts(36)]
    pairs = [f"{query}\t{text}\n" for query, text in texts]
    (home / "my/answers.tsv").write_text("query\tpositive\n" + "".join(pairs), encoding="utf-8")
    (home / "my/beir/qrels").mkdir(parents=True)
    for name, column in (("corpus", 1), ("queries", 0)):
        lines = [json.dumps({"_id": str(number), "text": row[column]}) + "\n" for number, row in enumerate(texts)]
        (home / f"my/beir/{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    judged = "".join(f"{number}\t{number}\t1\n" for number in range(9))
    (home / "my/beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", encoding="utf-8")


def encoders(home: Path) -> None:
    texts = [{"query": text[:40], "positive": text[40:90]} for text in make_texts(60)]
    (home / "my/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")


def faults(home: Path) -> None:
    shutil.copytree(home / "runs/quickstart", home / "runs/large")
    as_step(max((home / "runs/large/checkpoints").iterdir()), 1000)


def finetuning(home: Path) -> None:
    (task, *_) = blocks(ROOT / "docs/finetuning.md", "yaml")
    (home / "my/tone.yaml").write_text(task, encoding="utf-8")
    texts = make_texts(24)
    tone = [f"{text[:60]}\t{'up' if number % 2 else 'down'}\n" for number, text in enumerate(texts)]
    rte = [f"{text[:60]}\t{text[60:90]}\t{number % 2}\n" for number, text in enumerate(texts)]
    answers = [{"text": text[10:20], "answer_start": 10} for text in texts]
    asked = [{"id": str(n), "question": "Which?", "answers": [answer]} for n, answer in enumerate(answers)]
    paragraphs = [{"context": text[:200], "qas": [each]} for text, each in zip(texts, asked, strict=True)]
    (home / "my/asked.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    heads = {"tone": ("text\tlabel\n", tone), "RTE": ("sentence1\tsentence2\tlabel\n", rte)}
    for name, (head, rows) in heads.items():
        (home / "my" / name).mkdir()
        for split in ("train", "dev"):
            (home / "my" / name / f"{split}.tsv").write_text(head + "".join(rows), encoding="utf-8")


def mixtures(home: Path) -> None:
    sources = {"texts": {"kind": "text", "path": "my/texts"}}
    for name in ("web", "law"):
        spec = {"sources": sources, "validation_share": 0.2, "tokenizer": {"vocab_size": 512}}
        (home / f"{name}.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    streams = {name: {"path": f"data/{name}/train", "proportion": 0.5} for name in ("web", "law")}
    mixed = {"train": None, "streams": streams, "validation": "data/law/validation", "tokenizer": "data/web/tokenizer"}
    run = {"include": "yamls/quickstart.yaml", "name": "mine", "data": mixed}
    (home / "mine.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")


def moving(home: Path) -> None:
    (home / "their.yaml").write_text(THEIRS, encoding="utf-8")


def proteins(home: Path) -> None:
    draw = random.Random(5)
    records = (f">p{number}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=60))}\n" for number in range(400))
    (home / "my/proteins.fasta").write_text("".join(records), encoding="utf-8")


def watching(home: Path) -> None:
    shutil.copytree(home / "runs/quickstart", home / "runs/mine")
    rows = [{"text": text[:100], "label": number % 2} for number, text in enumerate(make_texts(20))]
    (home / "my/topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def weights(home: Path) -> None:
    checkpoints = home / "runs/quickstart/checkpoints"
    shutil.copytree(min(checkpoints.iterdir()), home / "copy")
    as_step((home / "copy").rename(checkpoints / "copy"), 733)
    shutil.copytree(home / "runs/quickstart/hf", home / "base")
    sizes = {key: int(value) for key, value in re.findall(r"model\.(\w+)=(\d+)", WIDTH)}
    written, _ = write_reference_checkpoint(home / "there", ModernBertConfig(vocab_size=8192, **sizes), home / "base")
    written.rename(home / "ep0-ba4000-rank0.pt")
    phase = {"tokens": 2_000, "row_tokens": 128, "batch_rows": 4, "microbatch_tokens": 512}
    folders = {name: f"data/for-base/{name}" for name in ("train", "validation", "tokenizer")}
    run = {"name": "mine-base", "data": folders, "optim": {"lr": 1e-3}, "phases": {"main": phase}}
    (home / "mine.yaml").write_text(json.dumps(run), encoding="utf-8")


PREPARED = {f"{function.__name__}.md": function for function in (
    adopt, averaging, clusters, code, data, encoders, entities, faults, finetuning, language, mixtures, moving,
    proteins, retrieval, use, watching, weights,
)} | {"sparse.md": retrieval}  # fmt: skip
