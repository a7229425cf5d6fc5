"""Models as their authors publish them: tokenizers with other names, no head, old buffers, wrapped state dicts.

Users start from such models. If this breaks, a RoBERTa or an embedding model is refused, or reads other tokens than its
authors' code.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modernbert_train import load_model
from modernbert_train.__main__ import main
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import read_vocabulary, role_tokens
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.source import open_model
from tests.support.foreign import (
    BERT,
    FOREIGN,
    ROBERTA,
    SIZE,
    TEXTS,
    mean_of_states,
    saved,
    task_of,
    tokenizer_with,
    two_classes,
)  # fmt: skip
from tests.support.front_door import Cli
from tests.support.make_shards import make_tokenizer
from tests.support.runs import records
from tests.support.sources import run_of
from tests.support.tiny_run import TinyRun

SLOW = pytest.mark.slow
# published families with tokenizers of their own
FAMILIES = ("xlm-roberta", "camembert", "eurobert", "deberta v3", "bert without a head")
NAMED = ["roberta", "mmbert", *(pytest.param(name, marks=SLOW) for name in FAMILIES)]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_embeds_as_its_authors_code_does(name: str, tmp_path: Path) -> None:
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    for text in TEXTS[:3]:
        ours = load_model(folder).embed([text])[0]
        torch.testing.assert_close(ours, mean_of_states(folder, text), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("says", "processor"),
    [("roles", "none"), ("map", "none"), ("none", "roberta"), ("none", "template"), ("decoder", "none")],
)
def test_roles_are_asked_of_each_file_in_turn(says: str, processor: str, tmp_path: Path) -> None:
    """A tokenizer.json alone has cls and sep in its post-processor; pad and mask are unknown."""
    names = BERT if says == "none" else ROBERTA
    folder = tokenizer_with(names, tmp_path / "t", says="roles" if says == "none" else says, processor=processor)
    if says == "none":
        (folder / "tokenizer_config.json").unlink()
    cls, pad, sep, unk, mask = names
    assert role_tokens(folder) == {"cls": cls, "sep": sep, "pad": pad, "mask": mask, "unk": unk}
    vocabulary = read_vocabulary(folder)
    assert (vocabulary.cls_id, vocabulary.pad_id, vocabulary.sep_id, vocabulary.mask_id) == (0, 1, 2, 4)
    assert not {0, 1, 2, 3, 4} & {*vocabulary.ordinary.tolist()}
    assert len(vocabulary.between) == (2 if processor == "roberta" else 1)


def test_a_file_beside_the_tokenizer_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tokenizer_with(ROBERTA, tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: cannot be read .* Restore it from a copy"):
        read_vocabulary(folder)


@pytest.mark.parametrize("name", ["roberta", "mmbert", "bert without a head"])
def test_buffers_wrappers_and_an_unnamed_class_change_nothing(name: str, tmp_path: Path) -> None:
    """Older files store positions as integers; torch.compile and DDP prefix all names."""
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    expected = load_weights(folder)
    stored = load_file(folder / "model.safetensors")
    begin = next(each for each in stored).partition("embeddings.")[0]
    buffers = {f"{begin}embeddings.position_ids": torch.arange(130)[None], f"{begin}mask": torch.ones(3).bool()}
    config = json.loads((folder / "config.json").read_text())
    for wrapper in ("", "_orig_mod.", "module.", "module._orig_mod.", "layer."):
        tensors = {f"{wrapper}{each}": tensor for each, tensor in {**stored, **buffers}.items()}
        if wrapper == "layer.":  # only the encoder's layers were compiled
            tensors = {re.sub(r"(layers?\.\d+\.)", r"\1_orig_mod.", each): stored[each] for each in stored}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for named in (config["architectures"], None):
            (folder / "config.json").write_text(json.dumps(config | {"architectures": named}))
            found = load_weights(folder)
            assert found.keys() == expected.keys() and all(torch.equal(found[each], expected[each]) for each in found)


def own_run(tiny_run: TinyRun, folder: Path, tmp_path: Path, **changes: Any) -> list[str]:
    """Prepare texts with a model's tokenizer; return a run on them of its architecture."""
    (tmp_path / "own.jsonl").write_text("".join(f'{{"text": "{n} {text}"}}\n' for n, text in enumerate(TEXTS)))
    (tmp_path / "spec.yaml").write_text(
        f"out: {tmp_path}/data\ntokenizer: {{path: {folder}}}\nvalidation_share: 0.2\n"
        f"sources: {{own: {{kind: jsonl, path: {tmp_path}/own.jsonl}}}}\n"
    )
    assert main(["prepare", str(tmp_path / "spec.yaml")]) == 0
    said = load_model(folder).config
    words = run_of(tiny_run(), {each.name: getattr(said, each.name) for each in fields(said)} | changes)
    return [*words, *(f"data.{key}={tmp_path}/data/{key}" for key in ("train", "validation", "tokenizer"))]


@pytest.mark.runs
@pytest.mark.parametrize("name", NAMED)
def test_a_model_is_continued_with_its_own_tokenizer(name: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    """From text to an export that transformers opens, with positions that begin after the padding's."""
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    words = own_run(tiny_run, folder, tmp_path)
    assert role_tokens(tmp_path / "data/tokenizer") == role_tokens(folder)
    assert main(["train", *words, f"weights.init_from={folder}"]) == 0
    assert main(["export", str(tmp_path / "runs/tiny")]) == 0
    hf = tmp_path / "runs/tiny/hf"
    text = TEXTS[1]
    torch.testing.assert_close(load_model(hf).embed([text])[0], mean_of_states(hf, text), rtol=0, atol=1e-5)
    mask = transformers.AutoTokenizer.from_pretrained(hf).mask_token
    assert main(["fill", str(hf), f"the quick {mask} fox"]) == 0


@pytest.mark.parametrize("name", ["mmbert", "roberta without a head", "eurobert"])
def test_any_model_is_exported(name: str, tmp_path: Path, cli: Cli) -> None:
    """In fp32, as its authors' code computes it; without a head it stays without one."""
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    assert "exported alone, as MODEL --out FOLDER" in cli("export", folder, code=78).err
    cli("export", folder, "--out", tmp_path / "hf")
    torch.testing.assert_close(
        load_model(tmp_path / "hf").embed(TEXTS[:1])[0], mean_of_states(folder, TEXTS[0]), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        mean_of_states(tmp_path / "hf", TEXTS[0]), mean_of_states(folder, TEXTS[0]), rtol=0, atol=1e-5
    )
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == [kind.__name__]


def test_a_folder_of_an_adapter_says_what_it_is(tmp_path: Path) -> None:
    folder = saved(transformers.BertModel, tmp_path / "model")
    shutil.move(folder / "config.json", folder / "adapter_config.json")
    with pytest.raises(DataError, match=r"an adapter of an unknown model, .*merge_and_unload"):
        load_model(folder)


def test_the_old_layout_of_sentence_transformers_is_opened(tmp_path: Path) -> None:
    folder = saved(transformers.BertModel, tmp_path / "model/0_Transformer").parent
    (folder / "modules.json").write_text("[]")
    assert torch.equal(load_model(folder).embed(TEXTS[:1]), load_model(folder / "0_Transformer").embed(TEXTS[:1]))


def test_a_folder_with_vocab_txt_alone_says_what_to_do(tmp_path: Path, cli: Cli) -> None:
    folder = saved(transformers.BertForMaskedLM, tmp_path / "model")
    shutil.move(folder / "tokenizer.json", folder / "vocab.txt")
    for verb in (["fill", str(folder), "[MASK]"], ["export", str(folder), "--out", str(tmp_path / "hf")]):
        said = cli(*verb, code=65).err
        assert "tokenizer.json: no such file, only vocab.txt; " in said and "save_pretrained" in said


@pytest.mark.runs
@pytest.mark.parametrize("name", ["roberta", "bert without a head"])
def test_pairs_are_classified_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """A RoBERTa has two separators between the texts of a pair, and one of BERT's encoders has token types."""
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    rows = [{"a": f"{n} {one}", "b": two, "label": "yn"[n % 2]} for n, (one, two) in enumerate(pairwise(TEXTS))]
    run = ["--model", str(folder), f"runs_folder={tmp_path}/runs", "name=pair", "compute.device=cpu"]
    assert main(["finetune", task_of(tmp_path, rows, text_columns=["a", "b"]), *run]) == 0
    hf = tmp_path / "runs/pair/hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(hf).eval()
    predicted = [json.loads(line) for line in (tmp_path / "runs/pair/predictions.jsonl").read_text().splitlines()]
    for row, each in list(zip(rows, predicted, strict=True))[:8]:
        with torch.no_grad():
            logits = model(**tokenizer(row["a"], row["b"], return_tensors="pt")).logits[0]
        probabilities = dict(zip(model.config.id2label.values(), logits.softmax(-1).tolist(), strict=True))
        assert each["scores"] == pytest.approx(probabilities, abs=1e-5)


OTHERS = ("bert", "xlnet", "llama", "distilbert", "albert", "deberta", "gemma", "neobert")
ENCODERS = ["modernbert", *(pytest.param(name, marks=SLOW) for name in OTHERS)]


@pytest.mark.runs
@pytest.mark.parametrize("name", ENCODERS)
def test_a_run_and_its_export_are_fine_tuned_alike(name: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    """To the bit, dropout included: config.json has the dropout of the weights' training."""
    shape = {"vocab_size": 512, "hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 48}
    own: dict[str, dict[str, Any]] = {
        "modernbert": {"local_attention": 16, "attention_out_dropout": 0.2},
        "llama": {"key_value_heads": 1},
        "albert": {"embedding_size": 24},
        "deberta": {"buckets": 8, "max_distance": 16},
        "gemma": {"key_value_heads": 1, "head_width": 16, "local_attention": 16},
    }
    dropout = {} if name in ("modernbert", "llama", "gemma", "neobert") else {"dropout": 0.2}
    words = run_of(tiny_run(), {"name": name, **shape, **own.get(name, {}), **dropout})
    assert main(["train", *words]) == 0
    assert main(["export", str(tmp_path / "runs/tiny")]) == 0
    assert open_model(tmp_path / "runs/tiny").missing == open_model(tmp_path / "runs/tiny/hf").missing == []
    task, losses = task_of(tmp_path, two_classes()), []
    for run, model in (("run", "runs/tiny"), ("hf", "runs/tiny/hf")):
        of_run = ["--model", str(tmp_path / model), f"runs_folder={tmp_path}/runs", f"name={run}", "compute.device=cpu"]
        assert main(["finetune", task, *of_run]) == 0
        losses.append([entry["loss"] for entry in records(tmp_path / "runs" / run, "step")])
    assert losses[0] == losses[1] and len(losses[0]) > 2


@pytest.mark.runs
def test_a_run_that_was_copied_is_a_model_anywhere(
    tiny_run: TinyRun,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    """It contains its tokenizer: users copy only a run's folder to another machine."""
    (tmp_path / "home").mkdir()
    shutil.copytree(tiny_data, tmp_path / "home/data")
    monkeypatch.chdir(tmp_path / "home")
    words = tiny_run("data.train=data/train", "data.validation=data/validation", "data.tokenizer=data/tokenizer")
    cli("train", *words, "runs_folder=runs")
    expected = load_model("runs/tiny").embed(TEXTS[:1])
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "home/runs/tiny", tmp_path / "elsewhere/copy")
    monkeypatch.chdir(tmp_path / "elsewhere")
    make_tokenizer(tmp_path / "elsewhere/data/tokenizer", vocab_size=400)  # of another project
    shutil.copytree(tiny_data / "validation", tmp_path / "elsewhere/data/train")
    assert main(["eval", "copy"]) == 0, "the data are found where the run was started"
    assert main(["average", "copy", "copy", "--out", "average"]) == main(["eval", "average"]) == 0, "its average's too"
    assert torch.equal(load_model("copy").embed(TEXTS[:1]), expected), "not by another project's tokenizer"
    shutil.rmtree(tmp_path / "home")
    shutil.rmtree("data")
    assert main(["fill", "copy", "the quick [MASK] fox"]) == 0, "without an export"
    assert main(["export", "copy"]) == 0 and load_model("copy/hf").embed(TEXTS[:1]).isfinite().all()
    shutil.copytree("copy", "tiny (1)")
    shutil.rmtree("tiny (1)/hf")
    assert main(["export", "tiny (1)"]) == 0, "a folder may have any name"
    shutil.rmtree("tiny (1)/checkpoints")
    assert torch.equal(load_model("tiny (1)").embed(TEXTS[:1]), expected), "its export is left"
    shutil.copytree(max(Path("copy/checkpoints").iterdir()), "step")
    with pytest.raises(DataError, match=r"step: the tokenizer of its training, .* is neither in data/tokenizer nor in"):
        load_model("step")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    cli("embed", "copy", tmp_path / "texts.txt", "--out", "v.npy")
    task = task_of(Path(), two_classes())
    cli("finetune", task, "--model", "copy", "runs_folder=r", "name=f", "compute.device=cpu")
    Path("r").rename("moved")
    assert main(["eval", "moved/f"]) == 0, "its labelled texts are in it"
    assert "data.train=data/train: " in cli("eval", "copy", code=65).err
    here = [f"data.train={tiny_data}/train", f"data.validation={tiny_data}/validation"]
    cli("eval", "copy", *here)


@pytest.mark.runs
@pytest.mark.parametrize("name", ["bert without a head", "eurobert"])
def test_any_encoder_is_shrunk_and_teaches_without_a_head(
    name: str, tiny_run: TinyRun, tmp_path: Path, cli: Cli
) -> None:
    """A head is needed only for predictions of tokens: for the divergence from a teacher's predictions."""
    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    words = own_run(tiny_run, folder, tmp_path, num_layers=1)
    assert "drawn at random" in cli("train", *words, f"weights.shrink_from={folder}").out
    teaches = f"{{name: distill, teacher: {folder}, kl_weight: %s, cosine_weight: 1}}"
    cli("train", *words, "name=taught", "objective=" + teaches % 0)
    assert (
        "so it predicts no tokens. Set objective.kl_weight=0"
        in cli("train", *words, "name=not", "objective=" + teaches % 1, code=78).err
    )


def test_weights_that_are_not_finite_are_found_when_the_model_is_opened(tmp_path: Path) -> None:
    """Before texts are read, a run is created or a teacher is used."""
    folder = saved(transformers.BertModel, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["encoder.layer.1.output.dense.bias"][3] = float("nan")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.Wo\.bias holds numbers that are not finite"):
        open_model(folder)


def test_a_table_is_compared_with_the_tokenizer_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer rows some tokens lack one; published models have a few more, and many more mean another tokenizer."""
    folder = saved(transformers.BertModel, tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    added = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": "[NEW]"}
    path.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], added]}))
    with pytest.raises(DataError, match=r"its table has 308 rows, and its tokenizer 309 entries"):
        open_model(folder)
    path.write_text(json.dumps(content))
    capsys.readouterr()  # transformers may have shown the progress of `saved`
    open_model(folder)
    assert capsys.readouterr().err == ""
    torch.manual_seed(3)
    kind = transformers.BertModel
    kind(kind.config_class(vocab_size=4000, **SIZE)).save_pretrained(folder)
    open_model(folder)
    assert "its table has 4,000 rows, and its tokenizer 308 entries; 3,692" in capsys.readouterr().err


def test_a_mask_is_filled_whatever_it_is_called(tmp_path: Path, cli: Cli) -> None:
    kind, names, settings = FOREIGN["roberta"]
    folder = saved(kind, tmp_path / "model", names, **settings)
    ours, theirs = cli("fill", folder, "the quick [MASK] fox", "the quick <mask> fox").out.strip().split("\n")[1::2]
    assert ours == theirs
    stored = {f"_orig_mod.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert theirs in cli("fill", folder, "the quick <mask> fox").out


def test_an_untrained_twin_has_new_weights_of_the_same_shapes(tmp_path: Path) -> None:
    folder = saved(transformers.BertModel, tmp_path / "model")
    model, twin = open_model(folder), open_model(folder, untrained=3)
    names = {name for name in model.shapes if name.startswith("model.")}
    assert {name: twin.shapes[name] for name in names} == {name: model.shapes[name] for name in names}
    table = "model.embeddings.tok_embeddings.weight"
    assert not torch.equal(twin.weights()[table], model.weights()[table])
