"""Low-rank adapters: trained by `finetune`, loaded by peft, merged for other programs."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import pytest
import torch

from modernbert_train.core.tensor_files import read_tensors
from modernbert_train.weights.adapter import WEIGHTS
from tests.support.finetuning import FAST, Tuning
from tests.support.labelled import sentences
from tests.support.runs import weights

pytestmark = pytest.mark.runs
LORA = ["lora.rank=4", "lora.lr=2e-2"]
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["modernbert", "roberta", *map(SLOW, ("bert", "deberta", "distilbert", "albert"))])
def test_peft_loads_what_was_trained(name: str, tuning: Tuning) -> None:
    """The encoder is unchanged; run, adapter and merged export give the same predictions."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    pooling = "mean" if name == "modernbert" else "cls"
    task = tuning.write(epochs=8, metrics=["accuracy"], labels=["down", "up"], pooling=pooling)
    result = tuning.run(task, name, *LORA)
    assert result["settings"]["lora"]["rank"] == 4
    folder = tuning.tone
    begun = read_tensors(tuning.models[name] / "model.safetensors")
    trained = weights(folder)
    assert {key for key in trained if ".lora_A." in key}
    assert sum(".lora_" in key for key in trained) % 2 == 0

    config = AutoConfig.from_pretrained(folder / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tuning.models[name], config=config)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    kept = {key: tensor for key, tensor in adapted.state_dict().items() if "base_layer.weight" in key}
    assert kept
    for key, tensor in kept.items():
        theirs = key.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(tensor, begun[theirs])
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    texts, labels = zip(*sentences(40, 2), strict=True)
    with torch.no_grad():
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        by_peft, by_merged = adapted(**batch).logits, merged(**batch).logits
    torch.testing.assert_close(by_peft, by_merged, rtol=0, atol=1e-5)
    told = [("down", "up")[number] for number in by_peft.argmax(dim=-1).tolist()]
    accuracy = sum(a == b for a, b in zip(told, labels, strict=True)) / 40
    assert accuracy == pytest.approx(result["figures"]["dev"]["accuracy"])
    if name == "modernbert":
        assert accuracy > 0.9
        # the next task continues from the merged weights
        tuning.cli("eval", folder)
        other = tuning.write(epochs=1, metrics=["accuracy"], labels=["down", "up"])
        tuning.run(other, folder, "compute.precision=fp32", into="next")
        assert "lora" not in "".join(weights(tuning.folder / "next/tone"))


@pytest.mark.timeout(600)
def test_many_tasks_are_a_folder_of_adapters_that_peft_loads_one_after_the_other(tuning: Tuning) -> None:
    """Of each task the best seed; an adapter whose base is another model is not among them, and is no model itself."""
    peft = pytest.importorskip("peft")
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    tuning.write(epochs=1, labels=["down", "up"]).rename(tuning.folder / "mood.yaml")
    tuning.write(epochs=2, labels=["down", "up"])
    suite = {"tone": {"finetune": "tone.yaml"}, "mood": {"finetune": "mood.yaml"}}
    suite["after"] = {"finetune": "mood.yaml", "after": "tone"}
    (tuning.folder / "suite.yaml").write_text(json.dumps({"tasks": suite, "seeds": [1, 2]}))
    out = tuning.folder / "out"
    words = [tuning.models["modernbert"], "--suite", tuning.folder / "suite.yaml", "--out", out, "--jobs", "2"]
    printed, home = tuning.cli("eval", *words, *LORA, *FAST).out, out / "adapters" / "modernbert"
    assert {path.name for path in home.iterdir()} == {"tone", "mood"} and f": {out}/adapters" in printed
    assert "after: its adapter is of " in printed
    (note,) = json.loads((out / "table.json").read_text())["notes"]
    assert note.startswith("after: its adapter is of ")
    config = AutoConfig.from_pretrained(home / "tone")
    base = AutoModelForSequenceClassification.from_pretrained(tuning.models["modernbert"], config=config)
    adapted = peft.PeftModel.from_pretrained(base, home / "tone", adapter_name="tone")
    adapted.load_adapter(home / "mood", adapter_name="mood")
    encoder = AutoModel.from_pretrained(tuning.models["modernbert"])
    sentence_model = SentenceTransformer(str(tuning.models["modernbert"]), device="cpu")  # pools by the mean
    for name in ("tone", "mood"):
        encoder.load_adapter(str(home / name), adapter_name=name)
        sentence_model.load_adapter(str(home / name), adapter_name=name)
    ids = torch.randint(8, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    (row,) = json.loads((out / "table.json").read_text())["rows"]
    for name, cell in zip(("tone", "mood"), row["cells"], strict=False):
        best = max(cell["runs"], key=lambda each: each["value"])["run"]
        merged = AutoModelForSequenceClassification.from_pretrained(out / best / "hf").eval()
        adapted.set_adapter(name)
        encoder.set_adapter(name)
        sentence_model.set_adapter(name)
        with torch.no_grad():
            torch.testing.assert_close(adapted.eval()(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
            states = encoder.eval()(ids).last_hidden_state, merged.model(ids).last_hidden_state
            text = sentence_model.tokenizer("a good day", return_tensors="pt")
            mean = merged.model(text["input_ids"]).last_hidden_state.mean(dim=1).squeeze(0)
        torch.testing.assert_close(*states, rtol=0, atol=1e-5)
        torch.testing.assert_close(sentence_model.encode("a good day", convert_to_tensor=True), mean, rtol=0, atol=1e-5)
    said = tuning.cli("finetune", tuning.folder / "tone.yaml", "--model", home / "tone", code=65).err
    assert f"tone: an adapter of {tuning.models['modernbert']}, without that model's weights" in said


@pytest.mark.timeout(300)
def test_an_adapter_names_a_base_that_peft_loads_with_the_weights_it_was_trained_on(tuning: Tuning) -> None:
    """Of a run its export, not one of other weights; without a base there is no adapter: peft would not notice."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForSequenceClassification

    task, run = tuning.write(epochs=1), tuning.folder / "first" / "tone"
    tuning.run(task, "bert", into="first")
    tuning.run(task, run, *LORA, "lr=1e-5", into="a")
    assert "adapters use lora.lr=0.02" in tuning.said
    folder = tuning.folder / "a" / "tone"
    about = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    named = about["base_model_name_or_path"]
    assert named == str(run / "hf") and (about["r"], about["lora_alpha"]) == (4, 8)
    config = AutoConfig.from_pretrained(folder / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(named, config=config)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "hf").eval()
    ids = torch.randint(8, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)

    shutil.rmtree(run / "hf")
    shutil.copytree(tuning.models["bert"], run / "hf")
    tuning.run(task, run, *LORA, into="b")
    assert f"no adapter is written: peft cannot open {run}" in tuning.said
    assert (tuning.folder / "b/tone/hf").is_dir() and not (tuning.folder / "b/tone/adapter").exists()
    tuning.cli("export", run)
    tuning.run(task, run, *LORA, into="b")
    assert (tuning.folder / "b/tone/adapter").is_dir()

    tuning.run(task, f"untrained:{tuning.models['bert']}", *LORA, into="c")
    assert "no adapter is written: it started from new random weights" in tuning.said
    assert not (tuning.folder / "c/tone/adapter").exists()


def test_layers_that_transformers_stores_otherwise(tuning: Tuning) -> None:
    """XLNet's attention is not a linear layer there: only the merged model is exported, with a message."""
    tuning.run(tuning.write(epochs=1), "xlnet", *LORA)
    assert "which peft does not adapt. Use the merged model in hf/" in tuning.said
    folder = tuning.tone
    assert (folder / "hf" / "config.json").is_file() and not (folder / "adapter").exists()


def test_targets_and_dropout_repeat_to_the_bit(tuning: Tuning) -> None:
    """Some targets only, with dropout: only they have adapters, and a second run has equal weights."""
    task = tuning.write(epochs=2)
    words = [*LORA, "lora.targets=[Wqkv]", "lora.dropout=0.1"]
    tuning.run(task, "modernbert", *words, into="a")
    trained = weights(tuning.folder / "a" / "tone")
    assert {key.split(".")[-3] for key in trained if ".lora_" in key} == {"Wqkv"}
    # vLLM's loader: a name is base_model.model, a module and lora_A or lora_B; other tensors are modules_to_save alone
    adapter = tuning.folder / "a" / "tone" / "adapter"
    about, tensors = json.loads((adapter / "adapter_config.json").read_text()), read_tensors(adapter / WEIGHTS)
    matrices = [key for key in tensors if re.fullmatch(r"base_model\.model\.(model\.\S+)\.lora_[AB]\.weight", key)]
    assert {key.split(".", 5)[5].rpartition(".lora_")[0] for key in matrices} == set(about["target_modules"])
    assert {key.split(".")[2] for key in tensors.keys() - matrices} == set(about["modules_to_save"])
    assert about["bias"] == "none" and about["lora_alpha"] / about["r"] == 2
    tuning.run(task, "modernbert", *words, into="b")
    again = weights(tuning.folder / "b" / "tone")
    assert all(torch.equal(trained[key], again[key]) for key in trained)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.targets=[query]"], "objective.lora.targets=query: no linear layer of this encoder has such a name"),
        (["lora.rank=0"], "lora.rank"),
        (["freeze=true", "lora.rank=4"], "a frozen encoder learns nothing"),
    ],
)
def test_what_cannot_be_adapted(words: list[str], message: str, tuning: Tuning) -> None:
    error = tuning.refused(tuning.write(), "bert", *words)
    assert message in error and "Traceback" not in error
