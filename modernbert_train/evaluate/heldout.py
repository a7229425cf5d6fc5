"""Held-out loss and accuracy of the objective, with a baseline that knows only token frequencies.

The validation documents, their rows and their masks depend only on the configuration, so figures of different steps,
runs and numbers of ranks are comparable.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from modernbert_train.batch import IGNORED_LABEL, Sums
from modernbert_train.clock import Clock, Position
from modernbert_train.config.evals import BITS_PER_BYTE, TEMPERATURE
from modernbert_train.config.schema import ContrastiveConfig, DataConfig, EvalConfig
from modernbert_train.data.arrays import held_out_lengths
from modernbert_train.data.facts import DataFacts, FolderFacts
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.mixture import Stream, TokenStreams
from modernbert_train.data.open_shards import open_shards
from modernbert_train.data.packing import GreedyPacker
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.data.unigram import Unigram, unigram_of
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, rows_of_all, sums_over_ranks, this_rank
from modernbert_train.errors import DataError
from modernbert_train.evaluate.samples import Samples
from modernbert_train.models.masked_lm import LABELS
from modernbert_train.objectives import build_objective

if TYPE_CHECKING:
    from modernbert_train.models.contrastive import Texts

MASK_SEED = 0  # masks of validation are the same for every run, independent of its seed


@dataclass(frozen=True)
class Evaluation:
    """Means over all predicted tokens: losses in nats, accuracies as shares.

    For pairs of texts, means are over the queries, and random guessing replaces the unigram baseline.
    """

    loss: float
    accuracy: float
    unigram_loss: float
    unigram_accuracy: float
    predicted: int
    # by name: loss and accuracy of the other terms; and, for every term, the model's other sums divided by its count
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "figures"}
        return {**own, **self.figures}

    def __str__(self) -> str:
        others = "".join(f", {name} {value:.3f}" for name, value in self.figures.items())
        return f"held-out loss {self.loss:.3f} (unigram {self.unigram_loss:.3f}), accuracy {self.accuracy:.1%}{others}"


class Validation:
    """The held-out documents, packed into rows, to measure models on.

    Args:
        settings: the run's section eval.
        packing_window: as in the run's section data.
        maker: reads and masks rows of the validation shards; keyed by MASK_SEED.
        lengths: tokens of each document that is read, see `held_out_lengths`.
        unigram: the baseline's losses and accuracies.
        key: the configuration key that names the text.
        bytes_per_token: of the text; None if the shards lack a byte count.

    Attributes:
        tokens: number of held-out tokens that each measurement reads.
        samples: texts of the last measurement that took samples, see samples.py; only on the first rank.
    """

    def __init__(
        self,
        settings: EvalConfig,
        packing_window: int,
        maker: MicrobatchMaker,
        lengths: Sequence[int] | NDArray[Any],
        unigram: Unigram,
        key: str = "data.validation",
        bytes_per_token: float | None = None,
    ) -> None:
        self._settings, self._packing_window = settings, packing_window
        self._key = key
        self._bytes_per_token = bytes_per_token
        self._maker = maker
        self._lengths = lengths
        self._unigram = unigram
        self.samples: list[dict[str, Any]] = []
        self.tokens = int(np.sum(lengths, dtype=np.int64))

    def plan(self, now: Position) -> BatchPlan:
        """Pack the documents in order into rows of the phase's length."""
        row_tokens = self._settings.row_tokens or now.phase.row_tokens
        objective = now.objective.for_validation()
        packer = GreedyPacker(row_tokens, self._packing_window, 1 << 62, objective.special_tokens)
        for document, length in enumerate(self._lengths):
            if length > 0:
                packer.add(0, document, int(length))
        packer.flush()
        rows = tuple(packer.ready)
        return BatchPlan(
            phase="validation",
            tokens_before=0,
            tokens=self.tokens,
            rows=rows,
            num_rows=len(rows),
            row_tokens=row_tokens,
            microbatch_rows=max(1, now.phase.tokens_at_once // row_tokens),
            objective=objective,
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, now: Position, compute: Compute, samples: Samples | None = None) -> Evaluation:
        """Measure a model; every rank calls it and gets the same figures.

        Args:
            model: called with microbatches; its training mode is restored afterwards.
            now: the phase, whose row length and microbatch size are used, and the objective in it.
            compute: where the model is, and the precision to compute in.
            samples: takes texts of the first row, then found in the attribute `samples`.
        """
        self.samples = []
        plan, device = self.plan(now), compute.device
        first_term = next(iter(plan.objective.terms))
        ranks = num_ranks()
        rows: tuple[Row, ...] = tuple(plan.rows) + ((),) * (-len(plan.rows) % ranks)  # the same number on every rank
        log_probability_V = torch.from_numpy(self._unigram.log_probability_V).to(device, torch.float32)
        sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))
        counts = dict.fromkeys(plan.objective.terms, 0)
        texts: list[Texts] = []
        vectors: list[Tensor] = []
        scale: Tensor | None = None
        was_training, first = model.training, True
        model.eval()
        for batch in self._maker.microbatches(rows[this_rank() :: ranks], plan):
            moved = batch.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=compute.bf16):
                if samples is not None and this_rank() == 0 and first and not plan.objective.compares:
                    with samples.watching(model, batch, plan.row_tokens) as self.samples:
                        result: Sums = model(moved, figures=True)
                else:
                    result = model(moved, figures=True)
            first = False
            for term in plan.objective.terms:
                counts[term] += batch.counts[term]
            if result.vectors is not None:
                from modernbert_train.models.contrastive import Texts, rows_of

                settings = cast(ContrastiveConfig, plan.objective)
                texts.append(Texts.of(batch, settings))
                vectors.append(result.vectors.index_select(0, rows_of(batch, settings).to(device)))
                scale = result.scale
                continue
            labels_M = moved.targets[LABELS]
            labels_P = labels_M[labels_M != IGNORED_LABEL]
            sums["unigram/loss"] -= log_probability_V[labels_P].sum().double()
            sums["unigram/hits"] += (labels_P == self._unigram.most_frequent).sum()
            for term in plan.objective.terms:
                sums[f"{term}/loss"] += result.losses[term].double()
            for name, figure in result.figures.items():
                sums[name] += figure
        if plan.objective.compares:
            for name, each in _compared(vectors, texts, cast(ContrastiveConfig, plan.objective), scale).items():
                sums[name] += each
        model.train(was_training)
        if isinstance(model, FSDPModule):
            model.reshard()  # without a backward pass, weights outside the layers stay gathered, on every rank
        totals = sums_over_ranks([*sums.values()], [*counts.values()])
        counts = dict(zip(counts, map(round, totals[len(sums) :]), strict=True))
        found_sums = dict(zip(sums, totals, strict=False))
        means = {name: each / max(1, counts.get(name.partition("/")[0], 0)) for name, each in found_sums.items()}
        if not (predicted := counts[first_term]):
            raise DataError(f"{self._key}: not one token to predict. Hold out more text, or raise eval.max_tokens.")
        loss = means.pop(f"{first_term}/loss")
        if self._bytes_per_token is not None and plan.objective.predicted_share:
            means[BITS_PER_BYTE] = loss / math.log(2) / self._bytes_per_token
        return Evaluation(
            loss=loss,
            accuracy=means.pop(f"{first_term}/hits"),
            unigram_loss=found_sums["unigram/loss"] / predicted,
            unigram_accuracy=found_sums["unigram/hits"] / predicted,
            predicted=predicted,
            figures={
                name.replace("/hits", "/accuracy"): mean
                for name, mean in means.items()
                if not name.startswith("unigram/")
            },
        )


def _compared(
    vectors: list[Tensor], texts: list[Texts], settings: ContrastiveConfig, scale: Tensor | None
) -> dict[str, Tensor]:
    """Return sums over this rank's queries, each compared with all held-out texts; the same sums for guessing; and the
    learned temperature."""
    from modernbert_train.models.contrastive import Texts, compare

    all_VW, texts_of_all, own = rows_of_all(torch.cat(vectors), Texts.joined(texts))
    everyone = Texts.joined(texts_of_all)
    compared = compare(all_VW, everyone, own, settings, backward=False, scale=scale)
    candidates, queries = len(everyone) - everyone.num_queries, len(compared.losses_Q)
    loss = compared.losses_Q.double().sum()
    return {
        "contrastive/loss": loss,
        "contrastive/hits": compared.hits.double(),
        "unigram/loss": torch.full_like(loss, queries * math.log(max(1, candidates))),
        "unigram/hits": torch.full_like(loss, queries / max(1, candidates)),
        **({} if scale is None else {TEMPERATURE: queries / scale[0].double()}),
        **(_terms(all_VW, everyone, own) if settings.is_sparse else {}),
    }


def _terms(vectors_NV: Tensor, texts: Texts, own: slice) -> dict[str, Tensor]:
    """Return the mean numbers of nonzero entries in the vectors of queries and documents, times this rank's texts."""
    from modernbert_train.models.contrastive import QUERY

    terms_N, is_query_N = (vectors_NV > 0).sum(dim=1).double(), (texts.roles_N == QUERY).to(vectors_NV.device)
    which = {"flops/query_terms": is_query_N, "flops/document_terms": ~is_query_N}
    return {name: terms_N[which_N].mean() * (own.stop - own.start) for name, which_N in which.items()}


@dataclass(frozen=True)
class HeldOutTexts:
    """Opens held-out texts of a run, all with the same rows and the unigram baseline of the training text.

    Attributes:
        data, eval: the run's sections.
        clock: its phases.
        vocab_size: rows of the embedding.
        facts: facts of its data.
    """

    data: DataConfig
    eval: EvalConfig
    clock: Clock
    vocab_size: int
    facts: DataFacts

    def validation(self) -> Validation:
        """Open the held-out text of data.validation."""
        assert self.facts.validation is not None
        return self.open(self.facts.validation)

    def open(self, folder: FolderFacts) -> Validation:
        """Open a folder of held-out shards."""
        vocabulary, card = self.facts.vocabulary, folder.card
        shards = open_shards(folder, self.data, vocabulary)
        streams = TokenStreams([Stream("validation", MASK_SEED, shards)])
        maker = MicrobatchMaker(streams, partial(build_objective, vocabulary=vocabulary), vocabulary)
        phases = self.clock.phases
        unigram = unigram_of(self.data, [each.phase for each in phases], self.vocab_size, self.facts)
        bytes_per_token = card.text_bytes / card.tokens if card.text_bytes else None
        are_whole = any(each.objective.reads_labels for each in phases)
        lengths = held_out_lengths(shards.lengths, self.eval.max_tokens, whole=are_whole, key=folder.key)
        window = self.data.packing_window
        return Validation(self.eval, window, maker, lengths, unigram, folder.key, bytes_per_token)
