"""Check that shards, tokenizer and model belong together, from small files and without torch.

Verbs check all folders of a run before anything else (`check_data`); open_shards.py checks each folder that it opens
(`require_tokenizer`), so tokens cannot be read unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from modernbert_train.config.objective import MASKINGS
from modernbert_train.config.schema import ObjectiveConfig, RunConfig
from modernbert_train.core.files import errors_to
from modernbert_train.core.text import table
from modernbert_train.data.facts import DataFacts, FolderFacts, further_folders, named_folders, read_facts, read_folder
from modernbert_train.data.mixing import phase_weights, token_shares
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary, read_vocabulary

FEW_PREDICTIONS = 1000  # fewer held-out predictions than this cause a warning about their uncertain mean loss
SPARE_ROWS, SPARE_SHARE = 256, 0.05  # more unused rows than both bounds are neither rounding nor a reserve
LOSS_DEVIATION = 3.0  # nats; of the loss of single predictions, whose mean is 2 to 7 nats in training


def check_data(config: RunConfig) -> DataFacts:
    """Compare the cards of the shards with the tokenizer and the model.

    Returns:
        The data that was compared.

    Raises:
        DataError: a folder is missing or damaged, or the shards were made with another tokenizer.
        ConfigError: the model's vocabulary or first position does not fit the tokenizer.
    """
    vocabulary = read_vocabulary(config.data.tokenizer)
    if vocabulary.num_entries > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer in {config.data.tokenizer}, "
            f"which has {vocabulary.num_entries} entries. Set model.vocab_size="
            f"{-(-vocabulary.num_entries // 64) * 64}."
        )
    ids = {"pad_id": vocabulary.pad_id, "mask_id": vocabulary.mask_id}
    if unfit := [*config.model.mistakes_with(config.data.tokenizer, **ids)]:
        raise ConfigError("\n".join(unfit))
    pairs = [now.objective.name for now in (config, *config.in_phase.values()) if "pair" in now.objective.heads]
    if pairs and config.model.segments > 1 and not vocabulary.segments_of_pairs:
        raise ConfigError(
            f"objective.name={pairs[0]}: the halves of a pair are two segments of model.name={config.model.name}, and "
            f"the tokenizer in {config.data.tokenizer} gives both texts of a pair token type 0, so the exported model "
            "would read pairs differently than in training. Prepare the data again, which repairs the tokenizer, or "
            "set objective.name=mlm."
        )
    labelled, compares = config.objective.is_labelled, compares_first(config)
    pairless = unread_streams(config, lambda objective: objective.compares)
    wordless = unread_streams(config, lambda objective: objective.reads_words)
    training = [key for key, _ in named_folders(config.data)][: len(config.data.all_streams)]
    mistakes: list[str] = []
    for key, path in [*named_folders(config.data), *further_folders(config.evals)]:
        with errors_to(mistakes.append, DataError):
            folder = read_folder(key, path, config.data)
            require_tokenizer(folder, config.data.tokenizer, vocabulary)
            if labelled and folder.card.labels_sha256 is None:
                raise DataError(
                    f"{key}={path}: its documents lack labels, which objective.name={config.objective.name} needs. "
                    "`python -m modernbert_train finetune` writes labelled shards."
                )
            if compares and key not in pairless:
                require_pairs(config, folder, compares)
            if config.reads_labels and config.eval.max_tokens is not None and key not in training:
                from modernbert_train.data.arrays import read_held_out  # imports numpy, which login nodes may lack

                read_held_out(folder.local, config.eval.max_tokens, whole=True, key=key)
            if not folder.card.words and key in training and key not in wordless:
                raise DataError(
                    f"{key}={path}: its documents lack words, which objective.words=segmenter masks. Prepare it "
                    "again with sources.NAME.words_field, or set objective.words=tokenizer; with data.streams, give "
                    "this one a proportion of 0 in that phase."
                )
    if mistakes:
        raise DataError("\n".join(mistakes))
    return read_facts(config.data)


def compares_first(config: RunConfig) -> str | None:
    """Return the first objective of the phases that compares texts of a batch; None without one."""
    return next((now.objective.name for now in config.in_phase.values() if now.objective.compares), None)


def unread_streams(config: RunConfig, reads: Callable[[ObjectiveConfig], bool]) -> tuple[str, ...]:
    """Return the keys of the training folders that no phase with such an objective reads."""
    own = dict.fromkeys(config.data.all_streams, 1)
    read = [
        phase_weights(config.data, phase, own)
        for name, phase in config.phases.items()
        if reads(config.in_phase[name].objective)
    ]
    keys = (key for key, _ in named_folders(config.data))
    return tuple(key for name, key in zip(own, keys, strict=False) if not any(weights[name] for weights in read))


def require_pairs(config: RunConfig, folder: FolderFacts, objective: str) -> None:
    """Raise DataError if the documents of a folder cannot be compared in the phases that do so.

    Args:
        config: the run.
        folder: of shards that such a phase reads.
        objective: its name, for messages.

    Raises:
        DataError: it holds no pairs, or they do not fit a row or a batch.
    """
    card, name = folder.card, f"{folder.key}={folder.path}"
    if card.sides is None or card.longest is None:
        raise DataError(
            f"{name}: its documents are no pairs of texts, which objective.name={objective} compares. "
            "`prepare` writes shards of pairs; with data.streams, give this one a "
            "proportion of 0 in that phase."
        )
    weighed = any("score" in now.objective.terms for now in config.in_phase.values())
    if weighed and not card.scored and folder.key != "data.validation":
        raise DataError(
            f"{name}: lacks the scores that objective.score_weight weighs. Prepare them with pairs.scores, or "
            "set objective.score_weight=0."
        )
    mean = card.tokens / card.documents + 2
    for phase_name, phase in config.phases.items():
        if not config.in_phase[phase_name].objective.compares:
            continue
        here = f"phases.{phase_name}.row_tokens={phase.row_tokens}"
        if card.longest > phase.row_tokens:
            raise DataError(
                f"{name}: has examples of up to {card.longest} tokens, and {here}. An example is never cut. Raise it, "
                "or prepare the pairs again with a lower pairs.max_tokens."
            )
        if phase.row_tokens * phase.batch_rows < 2 * mean and folder.key != "data.validation":
            raise DataError(
                f"{name}: a batch of {here} and batch_rows={phase.batch_rows} holds about one example of {mean:.0f} "
                "tokens, and a query needs texts of other examples as negatives. Raise batch_rows."
            )


def require_tokenizer(folder: FolderFacts, tokenizer: str, vocabulary: Vocabulary) -> None:
    """Compare the card of one folder of shards with the tokenizer.

    Args:
        folder: of shards.
        tokenizer: data.tokenizer, for messages.
        vocabulary: of that tokenizer.

    Raises:
        DataError: the folder holds no tokens, or was made with another tokenizer.
    """
    name, card = f"{folder.key}={folder.path}", folder.card
    if card.tokenizer_sha256 != vocabulary.sha256:
        raise DataError(
            f"{name}: made with another tokenizer (sha256 {card.tokenizer_sha256[:12]}...) than data.tokenizer="
            f"{tokenizer} ({vocabulary.sha256[:12]}...). Every token would have another meaning. Name the "
            "tokenizer folder next to the shards, or prepare them again."
        )
    if card.tokens == 0:
        raise DataError(f"{name}: the shards hold no tokens. Prepare them again from more text.")


def describe_streams(config: RunConfig, facts: DataFacts) -> str:
    """Return a table of streams: size, share of each phase, and passes over it in the run."""
    tokens = {name: folder.card.tokens for name, folder in facts.streams.items()}
    documents = {name: folder.card.documents for name, folder in facts.streams.items()}
    own = documents if config.data.mix_by == "documents" else tokens
    weights = {name: phase_weights(config.data, phase, own) for name, phase in config.phases.items()}
    share_of = token_shares(config.data, config.phases.values(), tokens, documents)
    head = ("stream", "tokens", "documents", *(f"share of {name}" for name in weights), "passes")
    rows = [head]
    for name in tokens:
        shares = (f"{each[name] / sum(each.values()):.2%}" for each in weights.values())
        passes = f"about {share_of[name] * config.total_tokens / tokens[name]:.2f}"
        rows.append((name, f"{tokens[name]:,}", f"{documents[name]:,}", *shares, passes))
    return f"{table(rows)}\nShares are of {config.data.mix_by}."


def few_predictions(config: RunConfig, facts: DataFacts) -> str | None:
    """Return a warning if the held-out text is too small for a meaningful loss; None if it is enough, or absent."""
    if facts.validation is None or compares_first(config):
        return None
    tokens_there, max_tokens = facts.validation.card.tokens, config.eval.max_tokens
    tokens = tokens_there if max_tokens is None else min(tokens_there, max_tokens)
    predictions = max(1, round(tokens * config.objective.for_validation().predicted_share))
    if predictions >= FEW_PREDICTIONS:
        return None
    cause = (
        f"data.validation={config.data.validation} has"
        if tokens == tokens_there
        else f"eval.max_tokens={max_tokens} leaves"
    )
    remedy = "Hold out more text" if tokens == tokens_there else "Raise eval.max_tokens"
    return (
        f"{cause} {tokens:,} tokens, of which about {predictions:,} are predicted: with so few the held-out loss has a "
        f"standard error of about {LOSS_DEVIATION / math.sqrt(predictions):.2g} nats, and smaller differences mean "
        f"nothing. {remedy}."
    )


def unread_rows(config: RunConfig, facts: DataFacts) -> str | None:
    """Return a warning if the embedding has many more rows than the tokenizer has entries; else None."""
    entries, size = facts.vocabulary.num_entries, config.model.vocab_size
    if size - entries <= max(SPARE_ROWS, SPARE_SHARE * size):
        return None
    return (
        f"model.vocab_size={size:,}: the tokenizer in {config.data.tokenizer} has {entries:,} entries, so "
        f"{(size - entries) / size:.0%} of the embedding are never read, and every prediction chooses among them too. "
        f"Set model.vocab_size={-(-entries // 64) * 64}, unless entries are to be added."
    )


def without_words(config: RunConfig) -> str | None:
    """Return a warning for masking=ngram if the tokenizer does not mark word continuations; else None."""
    objectives = [now.objective for now in (config, *config.in_phase.values())]
    needs_words = any(
        each.masking is not None and MASKINGS[each.masking].whole_words and not each.reads_words for each in objectives
    )
    if not needs_words or len(read_vocabulary(config.data.tokenizer).inside_words):
        return None
    return (
        f"objective.masking=ngram: the tokenizer in {config.data.tokenizer} does not mark which tokens continue a "
        "word, so each token counts as a whole word. Fine, if that is what you want."
    )
