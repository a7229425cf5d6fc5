"""A decoder of transformers becomes an encoder. If this breaks, it starts from weights that compute something else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file, save_file

from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.models.masked_lm import LABELS, POSITIONS, ForMaskedLM
from modernbert_train.weights.fill import fill
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.token_rows import TokenRows
from tests.support.front_door import Cli
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


@pytest.fixture
def decoder(tiny_data: Path, tmp_path: Path) -> Path:
    """Write a Qwen3 with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "decoder")
    transformers.AutoTokenizer.from_pretrained(tiny_data / "tokenizer").save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


@pytest.mark.runs
def test_a_decoder_is_continued_as_an_encoder(
    tiny_run: TinyRun,
    tmp_path: Path,
    decoder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    """The first loss is transformers' loss of predicting each masked token from the token before it; the export
    predicts the same way."""
    file = adapting(Path(tiny_run()[0]), decoder)
    seen: list[Batch] = []
    forward = ForMaskedLM.forward

    def recorded(self: ForMaskedLM, batch: Batch, figures: bool = False) -> Sums:
        seen.extend([batch] if self.training else [])
        return forward(self, batch, figures)

    monkeypatch.setattr(ForMaskedLM, "forward", recorded)
    assert (
        "a decoder, trained in causal order, and objective.name=mlm here"
        in cli("train", file, "phases.short.batch_warmup=null").out
    )

    folder = tmp_path / "runs/tiny"
    assert records(folder, "step")[0]["loss"] == pytest.approx(loss_of(decoder, seen[:2]), abs=2e-5)
    cli("export", folder)
    config = transformers.AutoConfig.from_pretrained(folder / "hf")
    assert (config.model_type, config.is_causal, config.predicts_from) == ("qwen3", False, "before")
    assert "predicted at the position of the token before" in (folder / "hf/README.md").read_text()
    cli("export", folder / "hf", "--out", tmp_path / "again")
    assert (
        fill(folder / "hf", ["a [MASK] b"]) == fill(tmp_path / "again", ["a [MASK] b"]) == fill(folder, ["a [MASK] b"])
    )


def adapting(file: Path, decoder: Path) -> Path:
    """Write a run that starts from the decoder's weights."""
    run = yaml.safe_load(file.read_text())
    run["model"] = {
        "name": "llama", "vocab_size": 512, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "key_value_heads": 1,
        "intermediate_size": 48, "norm_eps": 1e-6, "rope_theta": 10_000.0, "qk_norm": True,
    }  # fmt: skip
    run["objective"] = {"name": "mlm", "predict_from": "before"}
    run["weights"] = {"init_from": str(decoder)}
    run["phases"] = {"short": run["phases"]["short"] | {"schedule": {"warmup_tokens": 4000}}}
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return file


@pytest.mark.runs
def test_a_decoder_whose_tokenizer_has_no_mask_gets_a_row_for_it(
    tiny_run: TinyRun, decoder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """With a tokenizer that `prepare` extended, the row is the mean of all, and reported; otherwise it is refused."""
    path = decoder / "tokenizer.json"
    told = json.loads(path.read_text())
    mask = told["model"]["vocab"].pop("[MASK]")
    told["added_tokens"] = [each for each in told["added_tokens"] if each["content"] != "[MASK]"]
    path.write_text(json.dumps(told))
    begun: list[tuple[torch.Tensor, torch.Tensor]] = []
    taken_over = TokenRows.of

    def recorded(rows: TokenRows, table: torch.Tensor) -> torch.Tensor:
        begun.append((table, taken_over(rows, table)))
        return begun[-1][1]

    monkeypatch.setattr(TokenRows, "of", recorded)
    file = str(adapting(Path(tiny_run()[0]), decoder))
    assert "[MASK]" in cli("check", file, code=78).err
    said = cli("train", file, "phases.short.batch_warmup=null", "weights.vocabulary=extend").out
    assert "weights.vocabulary=extend: of 512 rows 511 are kept, 0 are the mean of old ones, 1 the mean of all" in said
    old, new = begun[0]
    ordinary = [*range(5, 512)]  # after [PAD], [UNK], [CLS], [SEP] and [MASK]
    torch.testing.assert_close(new[mask], old[ordinary].mean(0))
    others = [i for i in range(512) if i != mask]
    assert torch.equal(new[others], old[others])


@pytest.mark.runs
def test_a_decoder_with_a_head_of_its_own_is_not_taken_for_a_tied_one(
    tiny_run: TinyRun, decoder: Path, cli: Cli
) -> None:
    """Its predictions would come from the embedding; an exact copy of the embedding, as in Qwen3-0.6B, is accepted."""
    file = str(adapting(Path(tiny_run()[0]), decoder))
    first = load_weights(decoder)
    tensors = load_file(decoder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, decoder / "model.safetensors", {"format": "pt"})
    cli("check", file)
    again = load_weights(decoder)
    assert {*again} == {*first} and all(torch.equal(first[name], tensor) for name, tensor in again.items())
    tensors["lm_head.weight"] += 1
    save_file(tensors, decoder / "model.safetensors", {"format": "pt"})
    said = cli("train", file, "phases.short.batch_warmup=null", code=65).err
    assert "lm_head.weight is not tied to model.embed_tokens.weight" in said
    told = json.loads((decoder / "config.json").read_text())
    (decoder / "config.json").write_text(json.dumps(told | {"tie_word_embeddings": False}))
    said = cli("train", file, "phases.short.batch_warmup=null", code=78).err
    assert "model.tied=true here, false there" in said.lower()


@torch.no_grad()
def loss_of(decoder: Path, batches: list[Batch]) -> float:
    """Return transformers' loss of microbatches: each sequence alone, the logits before a mask against its target."""
    config = transformers.AutoConfig.from_pretrained(decoder)
    config.is_causal = False
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder, config=config).eval()
    losses = []
    for batch in batches:
        ids_T, ends = batch.packed.input_ids_T, batch.packed.cu_seqlens_S.tolist()
        logits = [model(ids_T[None, a:b]).logits[0] for a, b in itertools.pairwise(ends) if b > a]
        labels_M = batch.targets[LABELS]
        real_M = labels_M != IGNORED_LABEL
        logits_MV = torch.cat(logits)[batch.targets[POSITIONS][real_M]]
        losses.append(F.cross_entropy(logits_MV, labels_M[real_M], reduction="none"))
        masked_M = ids_T[batch.targets[POSITIONS][real_M] + 1]  # most of them are [MASK], one position later
        assert float((masked_M == masked_M.mode().values).float().mean()) > 0.6
    return float(torch.cat(losses).mean())
