"""From files to labelled shards: texts that are read, cut, or refused with their place."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.labels import DocumentLabels
from modernbert_train.data.packing import Chunk
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.examples import Example
from modernbert_train.evaluate.finetune.kinds import kind_of, task_problems
from modernbert_train.evaluate.finetune.read_texts import read_splits
from modernbert_train.evaluate.finetune.shards import Prepared, prepare, warnings_of
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.finetune.tokens import cut
from modernbert_train.evaluate.label_sidecar import read_texts
from modernbert_train.vocabulary import read_vocabulary
from tests.support.finetuning_fixtures import Hub
from tests.support.front_door import Cli
from tests.support.labelled import json_lines, write_splits, write_tsv
from tests.support.labelled_texts import decoded, documents, labels_in, prepared_of, task_of
from tests.support.tiny_run import TinyRun

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")


def write(folder: Path, train: list[tuple[Any, ...]], dev: list[tuple[Any, ...]], head: str = "text label") -> None:
    for name, rows in (("train", train), ("dev", dev)):
        write_tsv(folder / f"{name}.tsv", head.split(), rows)


def test_texts_become_documents_with_their_labels(tmp_path: Path, tokenizer: Path) -> None:
    """Labels in the order of the documents, classes by name, empty texts left out and counted."""
    write(tmp_path, [("aki ruto", "up"), ("  ", "up"), ("kelo", "down")], [("aki", "up"), ("lamu", "sideways")])
    prepared = prepared_of(tmp_path, tokenizer)
    assert prepared.labels == ("down", "up")
    assert prepared.unseen == {"dev": ("sideways",)}
    found = documents(prepared.folder / "train", tokenizer)
    assert prepared.counts["train"].empty == 1
    labels = labels_in(prepared.folder / "train", tokenizer)
    by_text = {decoded(tokenizer, ids): label for ids, label in zip(found, labels, strict=True)}
    assert by_text == {"aki ruto": [[1]], "kelo": [[0]]}
    assert labels_in(prepared.folder / "dev", tokenizer)[1] == [[2]]
    assert prepared.counts["dev"].unseen == 1
    assert "1 of classes missing in training" in "\n".join(warnings_of(prepared, task_of(tmp_path)))


def test_texts_that_are_measured_and_learned_and_texts_of_two_classes_are_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    """Otherwise memorised texts would raise the figure."""
    train = [("aki ruto", "up"), ("kelo", "down"), ("lamu", "up"), ("lamu ", "down")]
    write(tmp_path, train, [("aki  ruto", "up"), ("domi", "down"), ("nabe", "up")])
    prepared = prepared_of(tmp_path, tokenizer)
    assert (prepared.counts["dev"].in_train, prepared.counts["train"].in_train) == (1, 0)
    assert (prepared.counts["dev"].many_labels, prepared.counts["train"].many_labels) == (0, 2)
    said = [*warnings_of(prepared, task_of(tmp_path))]
    assert said[0] == "train: of 4 texts 2 that occur elsewhere with another label"
    assert said[1].startswith("dev: of 3 texts 1 that are in train too, so figures measure memorisation")


def test_the_longer_text_of_a_pair_is_cut_first_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    """A documented rule: transformers' longest_first. Otherwise a long premise would displace the hypothesis."""
    rows = [("aki " * 40, "kelo lamu", "up"), ("ruto", "domi", "down")]
    write(tmp_path, rows, rows, "a b label")
    prepared = prepared_of(tmp_path, tokenizer, 16, text_columns=["a", "b"])
    found = documents(prepared.folder / "train", tokenizer)
    assert sorted(map(len, found))[-1] == 14  # plus [CLS] and [SEP]
    assert prepared.longest == 16
    longest = decoded(tokenizer, max(found, key=len))
    assert longest.startswith("aki aki")
    assert longest.endswith("[SEP]kelo lamu")
    assert prepared.counts["train"].truncated == 1


@pytest.mark.parametrize("lengths", [(9, 3), (3, 9), (9, 9), (4, 5), (7, 4), (1, 20), (20, 1), (3, 3)])
@pytest.mark.parametrize("most", [6, 7, 8])
def test_pairs_are_cut_as_transformers_cuts_them(lengths: tuple[int, int], most: int, tokenizer: Path) -> None:
    """truncation="longest_first" of the exported tokenizer; otherwise serving would cut pairs differently."""
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    texts = [" ".join([word] * length) for word, length in zip(("aki", "kelo"), lengths, strict=True)]
    whole = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    theirs.enable_truncation(most, strategy="longest_first")
    told = theirs.encode(*texts, add_special_tokens=False)
    assert cut(whole, most) == [[i for i, n in zip(told.ids, told.sequence_ids, strict=True) if n == k] for k in (0, 1)]


def test_special_tokens_written_out_in_a_text_are_letters(tmp_path: Path, tokenizer: Path) -> None:
    """Otherwise a text that contains [SEP] would be read as a pair."""
    rows = [("aki [SEP] kelo", "up"), ("domi", "down")]
    write(tmp_path, rows, rows)
    found = documents(prepared_of(tmp_path, tokenizer).folder / "train", tokenizer)
    assert all(read_vocabulary(tokenizer).sep_id not in ids for ids in found)


def test_a_second_call_finds_the_shards_and_another_task_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """A restart must train on the same texts, and never on a mixture of two tasks."""
    write(tmp_path, [("aki", "up"), ("kelo", "down")], [("aki", "up"), ("kelo", "down")])
    first = prepared_of(tmp_path, tokenizer)
    made = (first.folder / "task.json").stat().st_mtime_ns
    assert prepared_of(tmp_path, tokenizer, lr=1.0) == first  # the learning rate is irrelevant
    assert (first.folder / "task.json").stat().st_mtime_ns == made
    with pytest.raises(ConfigError, match="max_tokens: 32 -> 16"):
        prepared_of(tmp_path, tokenizer, 16)
    write(tmp_path, [("aki", "down"), ("kelo", "up")], [("aki", "up"), ("kelo", "down")])
    with pytest.raises(ConfigError, match="made from another task, other texts"):
        prepared_of(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("train", "dev", "keys", "message"),
    [
        ([("a", "up"), ("b", "up")], [("a", "up")], {}, "all 2 texts are of one class .up., so"),
        ([("a", "up"), ("b", "nan")], [("a", "up")], {}, "line 3: label is 'nan', and not a class"),
        ([("a", "1"), ("b", "nan")], [("a", "1")], {"kind": "regression"}, "line 3: 'nan' is no score"),
        ([("a", "1"), ("b", "2")], [("a", "inf")], {"kind": "regression"}, "line 2: 'inf' is no score"),
        ([("a", "1"), ("b", "1.0")], [("a", "1")], {"kind": "regression"}, "all scores are equal"),
        ([("a", "up"), ("b", "left")], [("a", "up")], {"labels": ["down", "up"]}, "classes left are not in labels="),
        ([("a", "0"), ("b", "-1")], [("a", "0")], {"labels": ["down", "up"]}, "class -1 of 2 classes. A split that"),
        ([("a", "['x', 'y']"), ("b", "[]")], [("a", "x")], {"kind": "multi-label"}, "line 2: .* a list that was"),
        ([("a", "1"), ("b", "1e39")], [("a", "1")], {"kind": "regression"}, "line 3: '1e39' is no score"),
        ([("a", "up"), ("b", "down")], [(" ", "up")], {}, "contains no text with a letter"),
        ([("a", "up"), ("b", "down", "more")], [("a", "up")], {}, "line 3: 3 cells in a row, the header names 2"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_learned_are_refused_with_their_place(
    train: list[Any], dev: list[Any], keys: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    write(tmp_path, train, dev)
    with pytest.raises(DataError, match=message):
        prepared_of(tmp_path, tokenizer, **keys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".task.lock"]


SEVERAL = {"kind": "multi-label", "text_columns": ["text"]}


@pytest.mark.parametrize(
    ("label", "keys", "message"),
    [
        ([0, 1, 1], SEVERAL, "line 1: label is .*, a 0 or 1 for each class. Write the list of the classes"),
        ([True, False, False], SEVERAL, "line 1: label is .*, a 0 or 1 for each class"),
        ({"a": 1}, SEVERAL, "line 1: label is a dict, and not the classes of a text"),
        (None, SEVERAL, "line 1: label is None, and not the classes of a text"),
        (0.5, SEVERAL, "line 1: label is 0.5, and not the classes of a text"),
        ("1", {"labels": ["down", "up"]}, "classes 1 are not in labels="),
    ],
)
def test_a_label_of_another_convention_is_never_made_a_class(
    label: Any, keys: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    """A class called "{'a': 1}", or two classes 0 and 1 for everything, would train without meaning."""
    rows = [{"text": "aki", "label": label}, {"text": "kelo", "label": ["up"] if "kind" in keys else "up"}]
    with pytest.raises(DataError, match=message):
        prepared_of(tmp_path, tokenizer, **write_splits(tmp_path, "jsonl", json_lines(rows)), **keys)


def test_a_whole_number_is_the_class_of_its_place_where_none_is_called_so(tmp_path: Path) -> None:
    """GLUE's files contain names, its datasets numbers: the order of logits must be the same."""
    write(tmp_path, [("a", "1"), ("b", "0"), ("c", "entailment")], [("a", "not_entailment")])
    task = task_of(tmp_path, labels=["entailment", "not_entailment"])
    labels = kind_of("single-label").numbers(task, read_splits(task))
    assert [each.item() for each in labels.values["train"]] == [1, 0, 0]
    assert [each.item() for each in labels.values["dev"]] == [1]
    write(tmp_path, [("a", "10"), ("b", "9"), ("c", "1")], [("a", "9")])
    labels = kind_of("single-label").numbers(task_of(tmp_path), read_splits(task_of(tmp_path)))
    assert labels.names == ("1", "9", "10")


def test_several_classes_come_as_a_list_or_between_commas(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"text": "a", "label": ["x", "y"]}, {"text": "b", "label": []}, {"text": "c", "label": "y, z"}]
    prepared = prepared_of(tmp_path, tokenizer, kind="multi-label", **write_splits(tmp_path, "jsonl", json_lines(rows)))
    assert prepared.labels == ("x", "y", "z")
    assert sorted(labels_in(prepared.folder / "train", tokenizer)) == [[[0, 0, 0]], [[0, 1, 1]], [[1, 1, 0]]]


def test_a_class_may_be_called_none_and_files_may_be_compressed(tmp_path: Path, tokenizer: Path) -> None:
    """For, against and none are classes of stance; in a .tsv a missing value looks the same unless labels names it."""
    write(tmp_path, [("aki", "none"), ("kelo", "for")], [("aki", "for")])
    assert prepared_of(tmp_path, tokenizer, labels=["for", "none"]).labels == ("for", "none")
    text = json_lines([{"text": "aki", "label": "none"}, {"text": "kelo", "label": "for"}])
    files = write_splits(tmp_path, "jsonl.gz", "")
    for file in tmp_path.glob("*.gz"):
        file.write_bytes(gzip.compress(text.encode()))
    (tmp_path / "run").rename(tmp_path / "other")
    assert prepared_of(tmp_path, tokenizer, **files).labels == ("for", "none")


def test_scores_are_kept_to_the_bit(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path, [("a", "3.2"), ("b", "0")], [("a", "1e-3")])
    prepared = prepared_of(tmp_path, tokenizer, kind="regression")
    assert sorted(labels_in(prepared.folder / "train", tokenizer)) == [[[0.0]], [[np.float32(3.2).item()]]]


CONLL = "-DOCSTART- -X- O\n\naki\tB-x\nruto\tI-x\nkelo\tO\n\nlamu\tI-y\n"


def test_words_have_their_tag_at_their_first_token(tmp_path: Path, tokenizer: Path) -> None:
    """As in transformers' token classification; the rest of a word is unlabelled."""
    prepared = prepared_of(tmp_path, tokenizer, kind="tokens", **write_splits(tmp_path, "conll", CONLL, "aki\tB-z\n"))
    assert prepared.labels == ("O", "B-x", "I-x", "I-y")
    assert prepared.unseen == {"dev": ("B-z",)}
    assert prepared.counts["train"].loose_tags == 1
    found = documents(prepared.folder / "train", tokenizer)
    number = max(range(2), key=lambda n: len(found[n]))
    own = labels_in(prepared.folder / "train", tokenizer)[number]
    assert decoded(tokenizer, found[number]).split() == ["aki", "ruto", "kelo"]
    assert [label for label in own if label >= 0] == [1, 2, 0]
    firsts = [n for n, label in enumerate(own) if label >= 0]
    assert [decoded(tokenizer, found[number][n : n + 1]).strip()[:1] for n in firsts] == ["a", "r", "k"]


def test_words_beyond_the_context_are_cut_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    text = "".join(f"{word}\tO\n" for word in ["aki", "ruto", "kelo"] * 20) + "lamu\tB-x\n"
    files = write_splits(tmp_path, "conll", "domi\tB-x\nkelo\tO\n\n" + text)
    counts = prepared_of(tmp_path, tokenizer, 16, kind="tokens", **files).counts["dev"]
    assert counts.truncated == 1
    assert 30 < counts.lost_words < 61


def sentences_of(folder: Path, content: str) -> list[Example]:
    """Return the sentences of a file."""
    (folder / "a.conll").write_text(content, newline="", encoding="utf-8")
    keys = {"kind": "tokens", "train": f"{folder}/a.conll", "validation": {"dev": f"{folder}/a.conll"}}
    return read_splits(task_of(folder, **keys))["train"].examples


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "# sent 1\na\tO\n\n\n# sent 2\nb\u00a0c\tB-X\n#tag\tO\n",
            [(("a",), ("O",)), (("b\u00a0c", "#tag"), ("B-X", "O"))],
        ),
        ("# O\nb O\n", [(("#", "b"), ("O", "O"))]),
        ("10\u00a0000 B-PER\nkeli  O\n", [(("10\u00a0000", "keli"), ("B-PER", "O"))]),
        ("ba\u2028da B-PER\nkeli  O\n", [(("ba\u2028da", "keli"), ("B-PER", "O"))]),
        ("ba\u0085da B-PER\nkeli  O\n", [(("ba\u0085da", "keli"), ("B-PER", "O"))]),
        ("a\u3000b B-PER\nkeli  O\n", [(("a\u3000b", "keli"), ("B-PER", "O"))]),
        ("a\u2009b B-PER\nkeli  O\n", [(("a\u2009b", "keli"), ("B-PER", "O"))]),
    ],
)
def test_words_tags_and_comments_of_conll(content: str, expected: Any, tmp_path: Path) -> None:
    """A comment read as a word would make the tagger learn the file's layout; other alphabets' spaces are letters."""
    assert [(each.texts, each.label) for each in sentences_of(tmp_path, content)] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("aki\tB-x\nruto\n", "line 2: 'ruto' is no word with a tag"),
        ("aki\tB-x\nruto\tX-y\n", "line 2: the tag 'X-y' is none of O, B-x"),
        ("aki\tB-\n", "line 1: the tag 'B-' is none"),
        ("\tO\n", r"line 1: '\\tO' is no word"),
        ("a O\nNew York B-LOC\n", "line 2: 'New York B-LOC' has 3 columns, and the first word has 2"),
    ],
)
def test_a_conll_file_with_broken_tags_is_refused_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        sentences_of(tmp_path, content)


def test_a_labelled_document_is_never_cut_over_rows() -> None:
    """Half a premise with a pair's label would teach nonsense."""
    labels = DocumentLabels(np.array([[1], [0]]), np.array([5, 3]))
    assert labels.of(0, Chunk(0, 0, 0, 5)).tolist() == [[1]]
    with pytest.raises(DataError, match="document 0 has a label and 5 tokens, and was cut to 3"):
        labels.of(0, Chunk(0, 0, 0, 3))
    by_token = DocumentLabels(np.arange(8), np.array([5, 3]))
    assert by_token.of(1, Chunk(0, 9, 0, 3)).tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="for 2 documents"):
        DocumentLabels(np.arange(7), np.array([5, 3]))


@pytest.mark.parametrize("name", GLUE)
def test_every_built_in_task_reads_local_files_and_the_hub_alike(name: str, tmp_path: Path, hub: Hub) -> None:
    """GLUE's own form: columns and classes as in its datasets."""
    import datasets

    task, _ = read_task(name, [])
    columns = [*task.text_columns, task.label_column]
    labels: list[Any] = [0.5, 4.0] if task.kind == "regression" else [0, 1]
    texts = [("a", "b"), ("c", "d")]
    cells = [(*each[: len(columns) - 1], label) for each, label in zip(texts, labels, strict=True)]
    feature: Any = datasets.Value("float32") if task.kind == "regression" else datasets.ClassLabel(names=task.labels)
    features = dict.fromkeys(columns[:-1], datasets.Value("string")) | {columns[-1]: feature}
    asked = hub([dict(zip(columns, each, strict=True)) for each in cells], features)
    found = kind_of(task.kind).numbers(task, read_splits(task))
    assert {each[:2] for each in asked} == {("nyu-mll/glue", name)}
    shown = [(*each, task.labels[label] if task.labels else label) for *each, label in cells]
    for split in (task.train, *task.validation.values()):
        write_tsv(tmp_path / f"{split}.tsv", columns, shown)
    local, _ = read_task(name, [f"data={tmp_path}"])
    files = kind_of(task.kind).numbers(local, read_splits(local))
    assert found.names == files.names == tuple(task.labels)
    both = ({k: [v.tolist() for v in each] for k, each in labels.values.items()} for labels in (found, files))
    assert next(both) == next(both)
    assert task.large.lr is not None


def test_a_hub_that_does_not_answer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"the hub does not give it \(no route\).*data=FOLDER"):
        read_splits(read_task("cola", [])[0])


ANSWERS, CHOICES = {"kind": "question-answering"}, {"kind": "multiple-choice"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation": {}}, "validation: empty, and at least one split is needed"),
        ({"text_columns": ["a", "b", "c"]}, "name one column, or two"),
        ({"text_columns": ["label"]}, "the text would contain the label"),
        ({"labels": ["a", "a"]}, "a name is listed twice"),
        ({"metrics": ["bleu"]}, "bleu is not one of kind=single-label"),
        ({"metrics": ["relation_f1"]}, "relation_f1 is not one of kind=single-label"),  # it leaves out the first class
        ({"metrics": ["f1"]}, "f1 measures the second of two labels"),
        ({"kind": "regression", "labels": ["a", "b"]}, "a score has none"),
        ({"warmup": 1.5}, "warmup=1.5: must be at least 0 and below 1"),
        ({"epochs": 0}, "must be above 0"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: must be above 0, or null, which does not clip"),
        (ANSWERS | {"overlap_tokens": 256}, "below max_tokens=256"),
        (ANSWERS | {"metrics": ["no_answer_exact"]}, "Set unanswerable=true"),
        (ANSWERS | {"labels": ["a", "b"]}, "answers are no classes"),
        (ANSWERS | {"text_columns": ["a"]}, "name the columns of the question and of its context"),
        ({"kind": "single-label", "overlap_tokens": 3}, "only for kind=question-answering"),
        (CHOICES, "name a column with a list of choices"),
        (CHOICES | {"choice_columns": ["text"]}, "name a column with a list of choices"),
    ],
)
def test_a_mistake_in_a_task_is_reported_without_its_files(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in "\n".join(task_problems(task_of(tmp_path, **keys)))


def test_keys_of_the_task_and_of_the_run_are_distinguished(tmp_path: Path) -> None:
    """data= is the path of the texts, data.num_workers= a key of the run."""
    task, rest = read_task("rte", ["data=here", "data.num_workers=0", "lr=1e-3", "optim.name=muon", "seed=3"])
    assert (task.data, task.lr) == ("here", 1e-3)
    assert rest == ["data.num_workers=0", "optim.name=muon", "seed=3"]
    texts = tmp_path / "tone.jsonl"
    texts.write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(ConfigError, match=r"tone\.jsonl: is no task, which is a YAML file.* set train=.*tone\.jsonl"):
        read_task(str(texts), [])
    with pytest.raises(ConfigError, match="no such task. Known: cola, .*mnli, mrpc"):
        read_task("imdb", [])


def test_the_papers_table_is_the_default() -> None:
    """arXiv 2412.13663, table 6; other sources state three epochs for base."""
    base = {"cola": 5, "mnli": 1, "mrpc": 10, "qnli": 2, "qqp": 10, "rte": 3, "sst2": 2, "stsb": 10}
    assert {name: read_task(name, [])[0].epochs for name in base} == base
    qnli = read_task("qnli", [])[0]
    assert (qnli.lr, qnli.weight_decay) == (8e-5, 5e-6)
    assert (qnli.large.lr, qnli.large.weight_decay, qnli.large.epochs) == (3e-5, 5e-6, 2)


def test_damaged_or_missing_labels_are_found_before_training(tmp_path: Path, tokenizer: Path) -> None:
    """One flipped bit would teach another class."""
    write(tmp_path, [("aki", "up"), ("kelo", "down")], [("aki", "up"), ("kelo", "down")])
    folder = prepared_of(tmp_path, tokenizer).folder / "train"
    content = bytearray((folder / "labels.npy").read_bytes())
    content[-4] ^= 1
    (folder / "labels.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"labels.npy: sha256 .*, but dataset.json says"):
        read_card(folder)
    (folder / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels.npy: dataset.json names it"):
        read_card(folder)


CLASSIFY = "objective={name: classify, labels: [a, b]}"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["objective={name: classify}"], 78, "objective.labels=[] with objective.name=classify: one class leaves"),
        (["objective={name: tag, labels: [a, a]}"], 78, "a name is listed twice"),
        (["objective={name: classify, kind: regression, labels: [a, b]}"], 78, "a score has none"),
        (["objective={name: classify, labels: [a, b], segments: 2}"], 78, "objective.segments=2 with model.name="),
        ([CLASSIFY], 78, "data.validation={data}/validation with objective.name=classify"),
        ([CLASSIFY, "data.validation=null"], 65, "its documents lack labels, which objective.name=classify needs"),
        (["evals.dev={name: scores, shards: {data}/train, metrics: [accuracy]}"], 78, "it predicts no labels"),
    ],
)
def test_a_run_of_labels_that_cannot_be_is_refused_by_check(
    words: list[str], code: int, message: str, tiny_run: TinyRun, tiny_data: Path, cli: Cli
) -> None:
    overrides = [word.replace("{data}", str(tiny_data)) for word in words]
    assert message.replace("{data}", str(tiny_data)) in cli("check", *tiny_run(*overrides), code=code).err


# --- questions: windows, answers and choices ----------------------------------------------------------------------

CONTEXT = "nabe ruto tinda mosa aki lebi nabe beru kelo ruto lamu domi"


def asked(number: int, answer: str | None = "aki lebi", start: int | None = None) -> dict[str, Any]:
    start = CONTEXT.index(answer or "") if start is None else start
    found = [] if answer is None else [{"text": answer, "answer_start": start}]
    return {"id": f"q{number}", "question": " ruto mosa?", "answers": found}


def squad(folder: Path, *questions: dict[str, Any], name: str = "train") -> Path:
    file = folder / f"{name}.json"
    paragraphs = [{"context": CONTEXT, "qas": list(questions)}]
    file.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return file


def questions_of(folder: Path, **keys: Any) -> TaskConfig:
    files = {"train": f"{folder}/train.json", "validation": {"dev": f"{folder}/dev.json"}}
    task = TaskConfig(**{"kind": "question-answering", **files, "id_column": "id", "overlap_tokens": 4} | keys)
    assert not list(task_problems(task))
    return task


def prepared_in(folder: Path, tokenizer: Path, most: int = 64, **keys: Any) -> Prepared:
    return prepare(questions_of(folder, **keys), tokenizer, most, folder / "run" / "task")


@pytest.mark.parametrize("overlap", [4, 40])
def test_squads_json_becomes_windows_with_the_tokens_of_the_answer(
    overlap: int, tmp_path: Path, tokenizer: Path
) -> None:
    """The question precedes each window; an answer counts if a window contains all of it; windows cover all tokens,
    also with an overlap that does not fit after the question."""
    squad(tmp_path, asked(0), asked(1, "domi"))
    squad(tmp_path, asked(2), name="dev")
    prepared = prepared_in(tmp_path, tokenizer, 13, overlap_tokens=overlap)
    found = documents(prepared.folder / "train", tokenizer)
    assert len(found) > 2 and prepared.longest == 13 and prepared.counts["train"].texts == 2
    answers = []
    for ids, ((start, end),) in zip(found, labels_in(prepared.folder / "train", tokenizer), strict=True):
        assert decoded(tokenizer, ids).startswith("ruto mosa?[SEP]")
        answers += [decoded(tokenizer, ids[start - 1 : end])] if start else []  # after [CLS]
    assert {each.strip() for each in answers} == {"aki lebi", "domi"}
    (line,) = read_texts(prepared.folder / "dev")
    assert (line["id"], line["label"], line["context"]) == ("q2", ["aki lebi"], CONTEXT)
    windows = line["windows"]
    assert {first + n for first, number in windows for n in range(number)} == {*range(len(line["starts"]))}
    room = max(number for _, number in windows)
    shared = [first + number - second for (first, number), (second, _) in pairwise(windows)]
    assert room < 13 and all(each >= min(overlap, room // 2) for each in shared)
    words = {CONTEXT[start:end].strip() for start, end in zip(line["starts"], line["ends"], strict=True)}
    assert all(word in CONTEXT for word in words)


def test_jsonl_and_parquet_with_transformers_columns_are_the_same_texts(tmp_path: Path, tokenizer: Path) -> None:
    """Also the hub's, which have the same rows."""
    squad(tmp_path, asked(0), asked(1, "domi"))
    rows = []
    for each in (asked(0), asked(1, "domi")):
        lists = {key: [answer[key] for answer in each["answers"]] for key in ("text", "answer_start")}
        rows.append(each | {"context": CONTEXT, "answers": lists})
    (tmp_path / "dev.jsonl").write_text(json_lines(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "dev.parquet")
    files = {"squad": f"{tmp_path}/train.json"} | {end: f"{tmp_path}/dev.{end}" for end in ("jsonl", "parquet")}
    splits = read_splits(questions_of(tmp_path, validation=files))
    of_squad, *others = ([each._replace(place="") for each in splits[name].examples] for name in files)
    found = [(each.texts[0], each.label[0].text, each.id) for each in of_squad]
    assert found == [("ruto mosa?", "aki lebi", "q0"), ("ruto mosa?", "domi", "q1")]
    assert all(each == of_squad for each in others)


def test_an_answer_that_is_not_at_its_stated_place_is_left_out_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    """In training; for evaluation its text is compared, so it stays. If all are wrong, the file is refused."""
    squad(tmp_path, asked(0), asked(1, "domi", start=3))
    squad(tmp_path, asked(2, "domi", start=3), name="dev")
    prepared = prepared_in(tmp_path, tokenizer)
    assert [(each.texts, each.misplaced) for each in prepared.counts.values()] == [(1, 1)] * 2
    assert "1 whose answer is not where answer_start says" in "\n".join(warnings_of(prepared, questions_of(tmp_path)))
    assert labels_in(prepared.folder / "dev", tokenizer) == [[[-100, -100]]]
    squad(tmp_path, asked(1, "domi", start=3))
    with pytest.raises(DataError, match="none of 1 questions has an answer at the place where answer_start says"):
        prepare(questions_of(tmp_path), tokenizer, 64, tmp_path / "other" / "task")


def test_a_question_without_an_answer_is_of_version_2(tmp_path: Path, tokenizer: Path) -> None:
    """In version 1 it is refused, with its place; in version 2 every window of it predicts [CLS]."""
    squad(tmp_path, asked(0), asked(1, None) | {"is_impossible": True})
    squad(tmp_path, asked(2), name="dev")
    with pytest.raises(DataError, match="line 2: has no answer.*unanswerable=true"):
        prepared_in(tmp_path, tokenizer)
    prepared = prepared_in(tmp_path, tokenizer, unanswerable=True)
    assert labels_in(prepared.folder / "train", tokenizer)[1] == [[0, 0]]


@pytest.mark.parametrize(
    ("paragraph", "message"),
    [
        ({}, "is not as SQuAD's files are .KeyError: 'qas'"),
        ({"qas": [{"question": 3, "answers": []}]}, "line 1: .* is no text"),
        (
            {"qas": [{"question": "b", "answers": [{"text": "a"}]}]},
            "line 1: answers has an answer that lacks a text or",
        ),
    ],
)
def test_broken_files_say_where(paragraph: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "a", **paragraph}]}]}))
    squad(tmp_path, asked(0), name="dev")
    with pytest.raises(DataError, match=message):
        read_splits(questions_of(tmp_path, id_column=None))


@pytest.mark.parametrize("name", ["squad", "squad2", "swag"])
def test_the_tasks_here_read_the_hubs_columns(name: str, hub: Hub) -> None:
    """With the columns of the hub's datasets; otherwise a user would notice a renamed one an hour into a suite."""
    import datasets

    text, first = datasets.Value("string"), CONTEXT.index("aki")
    answers = [{"text": ["aki lebi"], "answer_start": [first]}, {"text": [], "answer_start": []}]
    rows: list[dict[str, Any]]
    if name == "swag":
        columns: dict[str, Any] = dict.fromkeys(("sent1", "sent2", *(f"ending{n}" for n in range(4))), text)
        rows = [{key: key for key in columns} | {"label": label} for label in (3, 0)]
        columns["label"] = datasets.ClassLabel(names=["0", "1", "2", "3"])
        expected = [[3], [0]]
    else:
        lists = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int32"))}
        columns = dict.fromkeys(("id", "title", "context", "question"), text) | {"answers": lists}
        question = {"id": "q0", "title": "t", "context": CONTEXT, "question": "ruto?"}
        rows = [question | {"answers": each} for each in answers[: 1 + (name == "squad2")]]
        expected = [[first, first + 7], [-1, -1]][: len(rows)]
    requests = hub(rows, columns)
    task, _ = read_task(name, [])
    splits = read_splits(task)
    labels = kind_of(task.kind).numbers(task, splits)
    assert [split for _, _, split in requests] == ["train", "validation"]
    assert [each[0].tolist() for each in labels.values["validation"]] == expected
    if name == "swag":
        assert splits["train"].examples[0].texts == ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3")
    else:
        assert splits["validation"].examples[0].id == "q0"


ENDINGS = [f"ending{number}" for number in range(3)]


def choices_of(folder: Path, rows: list[list[object]], **keys: Any) -> TaskConfig:
    """Write a task of choices in columns of a table; the same rows are measured."""
    for name in ("train", "dev"):
        write_tsv(folder / f"{name}.tsv", ("first", "second", *ENDINGS, "label"), rows)
    files = {"train": f"{folder}/train.tsv", "validation": {"dev": f"{folder}/dev.tsv"}}
    columns = {"text_columns": ["first", "second"], "choice_columns": ENDINGS}
    task = TaskConfig(**{"kind": "multiple-choice", **files, **columns} | keys)
    assert not list(task_problems(task))
    return task


ROWS: list[list[object]] = [["nabe ruto", "mosa", "aki", "kelo", "domi", 2], ["tinda", "lebi", "lamu", "beru", "", 0]]


def test_choices_become_one_document_with_a_sequence_each(tmp_path: Path, tokenizer: Path) -> None:
    """SWAG's shape, the second text before each ending; a question may have fewer choices."""
    prepared = prepare(choices_of(tmp_path, ROWS), tokenizer, 32, tmp_path / "run" / "task")
    found = documents(prepared.folder / "train", tokenizer)
    assert decoded(tokenizer, found[0]) == (
        "nabe ruto[SEP]mosa aki[SEP][CLS]nabe ruto[SEP]mosa kelo[SEP][CLS]nabe ruto[SEP]mosa domi"
    )
    assert decoded(tokenizer, found[1]) == "tinda[SEP]lebi lamu[SEP][CLS]tinda[SEP]lebi beru"
    assert labels_in(prepared.folder / "train", tokenizer) == [[[2]], [[0]]]
    assert prepared.labels == ("0", "1", "2")
    cut = prepare(choices_of(tmp_path, ROWS), tokenizer, 6, tmp_path / "short" / "task")
    assert cut.counts["train"].truncated == 2
    parts = decoded(tokenizer, documents(cut.folder / "train", tokenizer)[0]).split("[SEP][CLS]")
    assert len(parts) == 3 and all("[SEP]" in part for part in parts)


def test_a_list_of_choices_and_letters_are_read_as_races_are(tmp_path: Path, tokenizer: Path) -> None:
    """`options` is one column, `answer` a letter whose place is given by `labels`."""
    rows = [{"article": CONTEXT, "question": "aki?", "options": ["nabe", "ruto"], "answer": letter} for letter in "AB"]
    keys: dict[str, Any] = write_splits(tmp_path, "jsonl", json_lines(rows)) | {"labels": ["A", "B", "C", "D"]}
    keys |= {"text_columns": ["article", "question"], "choice_columns": ["options"], "label_column": "answer"}
    task = TaskConfig(kind="multiple-choice", **keys)
    prepared = prepare(task, tokenizer, 64, tmp_path / "run" / "task")
    assert labels_in(prepared.folder / "dev", tokenizer) == [[[0]], [[1]]]
    assert read_texts(prepared.folder / "dev")[1]["label"] == "B"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["nabe", "ruto", "aki", "kelo", "domi", 3], "line 4: label=3, and there are 3 choices: write 0 to 2"),
        (["nabe", "ruto", "aki", "kelo", "", 2], "line 4: label=2, and there are 2 choices"),
        (["nabe", "ruto", "aki", "kelo", "domi", "-1"], "line 4: label=-1, .*belongs under predict"),
        (["nabe", "ruto", "aki", "", "", 0], "line 4: 1 choices, or some that are not texts"),
        (["nabe", "ruto", "aki", "kelo", "domi", ""], "line 4: label is '', and not a class"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_its_place(
    row: list[object], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(choices_of(tmp_path, [*ROWS, row]), tokenizer, 32, tmp_path / "run" / "task")
