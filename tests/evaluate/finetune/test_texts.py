"""From files to labelled shards: texts that are read, cut, or refused with their place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.__main__ import main
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.labels import DocumentLabels
from modernbert_train.data.packing import Chunk
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.examples import Example
from modernbert_train.evaluate.finetune.kinds import kind_of, task_problems
from modernbert_train.evaluate.finetune.read import read_splits
from modernbert_train.evaluate.finetune.shards import prepare, warnings_of
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.finetune.tokens import cut
from modernbert_train.vocabulary import read_vocabulary
from tests.support.labelled import write_tsv
from tests.support.labelled_texts import decoded, documents, task_of
from tests.support.tiny_run import TinyRun

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")


def write(folder: Path, train: list[tuple[Any, ...]], dev: list[tuple[Any, ...]], head: str = "text label") -> None:
    for name, rows in (("train", train), ("dev", dev)):
        write_tsv(folder / f"{name}.tsv", head.split(), rows)


def test_texts_become_documents_with_their_labels(tmp_path: Path, tokenizer: Path) -> None:
    """Labels in the order of the documents, classes by name, empty texts left out and counted."""
    write(tmp_path, [("aki ruto", "up"), ("  ", "up"), ("kelo", "down")], [("aki", "up"), ("lamu", "sideways")])
    prepared = prepare(task_of(tmp_path), tokenizer, 32, tmp_path / "run" / "task")
    assert prepared.labels == ("down", "up")
    assert prepared.unseen == {"dev": ("sideways",)}
    found, shards = documents(prepared.folder / "train", tokenizer)
    assert len(found) == 2
    assert prepared.counts["train"].empty == 1
    by_text = {decoded(tokenizer, ids): shards.labels[n].tolist() for n, ids in enumerate(found) if shards.labels}
    assert by_text["aki ruto"] == [[1]]
    assert by_text["kelo"] == [[0]]
    assert documents(prepared.folder / "dev", tokenizer)[1].labels[1].tolist() == [[2]]  # type: ignore[index]
    assert prepared.counts["dev"].unseen == 1
    assert "1 of classes missing in training" in "\n".join(warnings_of(prepared, task_of(tmp_path)))


def test_texts_that_are_measured_and_learned_and_texts_of_two_classes_are_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    """Otherwise memorised texts would raise the figure."""
    train = [("aki ruto", "up"), ("kelo", "down"), ("lamu", "up"), ("lamu ", "down")]
    write(tmp_path, train, [("aki  ruto", "up"), ("domi", "down"), ("nabe", "up")])
    prepared = prepare(task_of(tmp_path), tokenizer, 32, tmp_path / "run" / "task")
    assert (prepared.counts["dev"].in_train, prepared.counts["train"].in_train) == (1, 0)
    assert (prepared.counts["dev"].many_labels, prepared.counts["train"].many_labels) == (0, 2)
    said = [*warnings_of(prepared, task_of(tmp_path))]
    assert said[0] == "train: of 4 texts 2 that occur elsewhere with another label"
    assert said[1].startswith("dev: of 3 texts 1 that are in train too, so figures measure memorisation")


def test_the_longer_text_of_a_pair_is_cut_first_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    """A documented rule: transformers' longest_first. Otherwise a long premise would displace the hypothesis."""
    rows = [("aki " * 40, "kelo lamu", "up"), ("ruto", "domi", "down")]
    write(tmp_path, rows, rows, "a b label")
    prepared = prepare(task_of(tmp_path, text_columns=["a", "b"]), tokenizer, 16, tmp_path / "run" / "task")
    found, _ = documents(prepared.folder / "train", tokenizer)
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
    prepared = prepare(task_of(tmp_path), tokenizer, 32, tmp_path / "run" / "task")
    assert all(
        read_vocabulary(tokenizer).sep_id not in ids for ids in documents(prepared.folder / "train", tokenizer)[0]
    )


def test_a_second_call_finds_the_shards_and_another_task_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """A restart must train on the same texts, and never on a mixture of two tasks."""
    write(tmp_path, [("aki", "up"), ("kelo", "down")], [("aki", "up"), ("kelo", "down")])
    folder = tmp_path / "run" / "task"
    first = prepare(task_of(tmp_path), tokenizer, 32, folder)
    made = (folder / "task.json").stat().st_mtime_ns
    assert prepare(task_of(tmp_path, lr=1.0), tokenizer, 32, folder) == first  # the learning rate is irrelevant
    assert (folder / "task.json").stat().st_mtime_ns == made
    with pytest.raises(ConfigError, match="max_tokens: 32 -> 16"):
        prepare(task_of(tmp_path), tokenizer, 16, folder)
    write(tmp_path, [("aki", "down"), ("kelo", "up")], [("aki", "up"), ("kelo", "down")])
    with pytest.raises(ConfigError, match="made from another task, other texts"):
        prepare(task_of(tmp_path), tokenizer, 32, folder)


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
        ([("a", "up"), ("b", "down")], [("a", "up")], {"label_column": "class"}, "line 1: no column 'class' among"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_learned_are_refused_with_their_place(
    train: list[Any], dev: list[Any], keys: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    write(tmp_path, train, dev)
    with pytest.raises(DataError, match=message):
        prepare(task_of(tmp_path, **keys), tokenizer, 32, tmp_path / "run" / "task")
    assert not (tmp_path / "run" / "task").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".task.lock"]


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
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"kind": "multi-label", "train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    prepared = prepare(task_of(tmp_path, **keys), tokenizer, 32, tmp_path / "run" / "task")
    assert prepared.labels == ("x", "y", "z")
    labels = documents(prepared.folder / "train", tokenizer)[1].labels
    assert labels is not None
    assert sorted(labels[n].tolist() for n in range(3)) == [[[0, 0, 0]], [[0, 1, 1]], [[1, 1, 0]]]


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path: Path, tokenizer: Path) -> None:
    """Programs that use UTF-16 may cut a pair; the tokenizer would end the run with another error."""
    rows = [{"text": "a \ud83c", "label": "x"}, {"text": "b \U0001f600", "label": "y"}]
    for name, some in (("train", rows[::-1]), ("dev", rows[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    keys = {"train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    with pytest.raises(DataError, match="line 2: half of a surrogate pair, which is no text. Correct it"):
        prepare(task_of(tmp_path, **keys), tokenizer, 32, tmp_path / "run" / "task")


def sentences_of(file: Path) -> list[Example]:
    """Return the sentences of a task whose training file this is."""
    keys = {"kind": "tokens", "train": str(file), "validation": {"dev": str(file)}}
    return read_splits(task_of(file.parent, **keys))["train"].examples


def test_spaces_of_other_alphabets_are_parts_of_words(tmp_path: Path) -> None:
    for word in ("10\u00a0000", "ba\u2028da", "ba\u0085da", "a\u3000b", "a\u2009b"):
        (tmp_path / "x.conll").write_text(f"{word} B-PER\nkeli  O\n", newline="", encoding="utf-8")
        (sentence,) = sentences_of(tmp_path / "x.conll")
        assert sentence.texts == (word, "keli") and sentence.label == ("B-PER", "O")


def test_scores_are_kept_to_the_bit(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path, [("a", "3.2"), ("b", "0")], [("a", "1e-3")])
    prepared = prepare(task_of(tmp_path, kind="regression"), tokenizer, 32, tmp_path / "run" / "task")
    labels = documents(prepared.folder / "train", tokenizer)[1].labels
    assert labels is not None
    assert {labels[n].item() for n in range(2)} == {np.float32(3.2).item(), 0.0}


CONLL = "-DOCSTART- -X- O\n\naki\tB-x\nruto\tI-x\nkelo\tO\n\nlamu\tI-y\n"


def test_words_have_their_tag_at_their_first_token(tmp_path: Path, tokenizer: Path) -> None:
    """As in transformers' token classification; the rest of a word is unlabelled."""
    (tmp_path / "train.conll").write_text(CONLL)
    (tmp_path / "dev.conll").write_text("aki\tB-z\n")
    keys = {"kind": "tokens", "train": f"{tmp_path}/train.conll", "validation": {"dev": f"{tmp_path}/dev.conll"}}
    task = task_of(tmp_path, **keys)
    prepared = prepare(task, tokenizer, 32, tmp_path / "run" / "task")
    assert prepared.labels == ("O", "B-x", "I-x", "I-y")
    assert prepared.unseen == {"dev": ("B-z",)}
    assert prepared.counts["train"].loose_tags == 1
    found, shards = documents(prepared.folder / "train", tokenizer)
    assert shards.labels is not None
    number = max(range(2), key=lambda n: len(found[n]))
    own = shards.labels[number].tolist()
    words = decoded(tokenizer, found[number]).split()
    assert words == ["aki", "ruto", "kelo"]
    assert [label for label in own if label >= 0] == [1, 2, 0]
    firsts = [n for n, label in enumerate(own) if label >= 0]
    assert [decoded(tokenizer, found[number][n : n + 1]).strip()[:1] for n in firsts] == ["a", "r", "k"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aki\tB-x\nruto\n", "line 2: 'ruto' is no word with a tag"),
        ("aki\tB-x\nruto\tX-y\n", "line 2: the tag 'X-y' is none of O, B-x"),
        ("aki\tB-\n", "line 1: the tag 'B-' is none"),
        ("\tO\n", "line 1: '.tO' is no word"),
    ],
)
def test_a_conll_file_with_broken_tags_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.conll"
    file.write_text(text)
    with pytest.raises(DataError, match=message.replace(".t", r"\\t")):
        sentences_of(file)


def test_words_beyond_the_context_are_cut_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    text = "".join(f"{word}\tO\n" for word in ["aki", "ruto", "kelo"] * 20) + "lamu\tB-x\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.conll").write_text("domi\tB-x\nkelo\tO\n\n" + text)
    keys = {"kind": "tokens", "train": f"{tmp_path}/train.conll", "validation": {"dev": f"{tmp_path}/dev.conll"}}
    counts = prepare(task_of(tmp_path, **keys), tokenizer, 16, tmp_path / "run" / "task").counts["dev"]
    assert counts.truncated == 1
    assert 30 < counts.lost_words < 61


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
def test_every_built_in_task_reads_local_files_and_the_hub_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLUE's own form: columns and classes as in its datasets."""
    import datasets

    task, _ = read_task(name, [])
    columns = [*task.text_columns, task.label_column]
    values = [("a", "b"), ("c", "d")]
    labels: list[Any] = [0.5, 4.0] if task.kind == "regression" else [0, 1]
    rows = [
        dict(zip(columns, (*texts[: len(columns) - 1], label), strict=True))
        for texts, label in zip(values, labels, strict=True)
    ]
    feature: Any = datasets.Value("float32") if task.kind == "regression" else datasets.ClassLabel(names=task.labels)
    features = datasets.Features({c: datasets.Value("string") for c in columns[:-1]} | {columns[-1]: feature})
    asked = []

    def load(data: str, subset: str, split: str) -> Any:
        asked.append((data, subset, split))
        return datasets.Dataset.from_list(rows, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load)
    hub = kind_of(task.kind).numbers(task, read_splits(task))
    assert {each[:2] for each in asked} == {("nyu-mll/glue", name)}
    for split in (task.train, *task.validation.values()):
        shown = [
            [row[c] for c in columns[:-1]] + [task.labels[row[columns[-1]]] if task.labels else row[columns[-1]]]
            for row in rows
        ]
        write_tsv(tmp_path / f"{split}.tsv", columns, shown)
    local, _ = read_task(name, [f"data={tmp_path}"])
    files = kind_of(task.kind).numbers(local, read_splits(local))
    assert hub.names == files.names == tuple(task.labels)
    assert {k: [v.tolist() for v in each] for k, each in hub.values.items()} == {
        k: [v.tolist() for v in each] for k, each in files.values.items()
    }
    assert task.large.lr is not None


def test_a_hub_that_does_not_answer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"the hub does not give it \(no route\).*data=FOLDER"):
        read_splits(read_task("cola", [])[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation": {}}, "validation: empty, and at least one split is needed"),
        ({"text_columns": ["a", "b", "c"]}, "name one column, or two"),
        ({"text_columns": ["label"]}, "the text would contain the label"),
        ({"labels": ["a", "a"]}, "a name is listed twice"),
        ({"metrics": ["bleu"]}, "bleu is not one of kind=single-label"),
        ({"metrics": ["f1"]}, "f1 measures the second of two labels"),
        ({"kind": "regression", "labels": ["a", "b"]}, "a score has none"),
        ({"warmup": 1.5}, "warmup=1.5: must be at least 0 and below 1"),
        ({"epochs": 0}, "must be above 0"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: must be above 0, or null, which does not clip"),
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
    for name, epochs in base.items():
        assert read_task(name, [])[0].epochs == epochs
    qnli = read_task("qnli", [])[0]
    assert (qnli.lr, qnli.weight_decay) == (8e-5, 5e-6)
    assert (qnli.large.lr, qnli.large.weight_decay, qnli.large.epochs) == (3e-5, 5e-6, 2)


def test_damaged_or_missing_labels_are_found_before_training(tmp_path: Path, tokenizer: Path) -> None:
    """One flipped bit would teach another class."""
    write(tmp_path, [("aki", "up"), ("kelo", "down")], [("aki", "up"), ("kelo", "down")])
    folder = prepare(task_of(tmp_path), tokenizer, 32, tmp_path / "run" / "task").folder / "train"
    content = bytearray((folder / "labels.npy").read_bytes())
    content[-4] ^= 1
    (folder / "labels.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"labels.npy: sha256 .*, but dataset.json says"):
        read_card(folder)
    (folder / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels.npy: dataset.json names it"):
        read_card(folder)


RULES = [
    ("{name: classify}", "objective.labels=[] with objective.name=classify: one class leaves nothing to distinguish"),
    ("{name: tag, labels: [a, a]}", "a name is listed twice"),
    ("{name: classify, kind: regression, labels: [a, b]}", "a score has none"),
    ("{name: classify, labels: [a, b], segments: 2}", "objective.segments=2 with model.name="),
    ("{name: classify, labels: [a, b]}", "data.validation={data}/validation with objective.name=classify"),
]


@pytest.mark.parametrize(("objective", "message"), RULES)
def test_a_run_of_labels_that_cannot_be_is_refused_by_check(
    objective: str, message: str, tiny_run: TinyRun, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *tiny_run(f"objective={objective}")]) == 78
    assert message.replace("{data}", str(tiny_data)) in capsys.readouterr().err


def test_shards_without_labels_and_measures_without_classes_are_refused(
    tiny_run: TinyRun, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_run("objective={name: classify, labels: [a, b]}", "data.validation=null")
    assert main(["check", *words]) == 65
    assert "its documents lack labels, which objective.name=classify needs" in capsys.readouterr().err
    for metrics, message in (("[accuracy]", "it predicts no labels"),):
        section = f"evals.dev={{name: scores, shards: {tiny_data}/train, metrics: {metrics}}}"
        assert main(["check", *tiny_run(section)]) == 78
        assert message in capsys.readouterr().err


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
    other = ["up"] if "kind" in keys else "up"
    for name in ("train", "dev"):
        rows = [{"text": "aki", "label": label}, {"text": "kelo", "label": other}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    with pytest.raises(DataError, match=message):
        prepare(task_of(tmp_path, **files, **keys), tokenizer, 32, tmp_path / "run" / "task")


def test_a_class_may_be_called_none_and_files_may_be_compressed(tmp_path: Path, tokenizer: Path) -> None:
    """For, against and none are classes of stance; in a .tsv a missing value looks the same unless labels names it."""
    rows = [{"text": "aki", "label": "none"}, {"text": "kelo", "label": "for"}]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    files = {"train": f"{tmp_path}/train.jsonl.gz", "validation": {"dev": f"{tmp_path}/dev.jsonl.gz"}}
    assert prepare(task_of(tmp_path, **files), tokenizer, 32, tmp_path / "a" / "task").labels == ("for", "none")
    write(tmp_path, [("aki", "none"), ("kelo", "for")], [("aki", "for")])
    task = task_of(tmp_path, labels=["for", "none"])
    assert prepare(task, tokenizer, 32, tmp_path / "b" / "task").labels == ("for", "none")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# sent 1\na\tO\n\n\n# sent 2\nb\u00a0c\tB-X\n#tag\tO\n", [("a",), ("b\u00a0c", "#tag")]),
        ("# O\nb O\n", [("#", "b")]),
        ("a O\nNew York B-LOC\n", "line 2: 'New York B-LOC' has 3 columns, and the first word has 2"),
        ("1\ta" + "\tO" * 8 + "\n", "line 1: the first of 10 columns is a number, as in CoNLL-U"),
        ("a\tU-PER\n", "line 1: the tag 'U-PER' is none of .* L- and U- of BILOU as E- and S-"),
    ],
)
def test_words_tags_and_comments_of_conll(content: str, expected: Any, tmp_path: Path) -> None:
    """A comment read as a word, or a number as the word, would make the tagger learn the file's layout."""
    (tmp_path / "a.conll").write_text(content)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            sentences_of(tmp_path / "a.conll")
    else:
        assert [each.texts for each in sentences_of(tmp_path / "a.conll")] == expected
