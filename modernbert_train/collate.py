"""Packing for other training loops: a plain function, and a collator for transformers.

`pack` is this project's packer on a list of lengths, without torch or Composer. `PackingCollator` lays rows out for
transformers' ModernBERT. Restarting `position_ids` is not enough there: for a bidirectional encoder transformers 5 does
not build a mask from them, so documents of a row would see each other. The collator instead returns one mask for each
kind of layer, which the model uses as it is (with its `sdpa` attention).
Shape legend: R rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from modernbert_train.data.packing import pack_greedy

if TYPE_CHECKING:
    from torch import Tensor


def pack(sequences: Sequence[int] | Sequence[Sequence[Any]], row_tokens: int) -> list[list[int]]:
    """Place sequences into rows; no sequence is split.

    Args:
        sequences: token ids of each, special tokens included, or only their lengths.
        row_tokens: capacity of one row, in tokens.

    Returns:
        One list of indices into `sequences` per row; every index appears exactly once.

    Raises:
        ValueError: a sequence is empty or longer than a row; names its index and both lengths.
    """
    return pack_greedy([len(s) if isinstance(s, Sized) else int(s) for s in sequences], row_tokens)


class PackingCollator:
    """Packs tokenised examples into rows, for `transformers.Trainer` or a torch DataLoader.

    Args:
        row_tokens: capacity of one row; longer examples are refused.
        pad_id: id that fills the ends of rows; no document sees it.
        local_attention: the model's `config.local_attention`: window of local layers, half on each side.
        mask_tokens: computes inputs and labels from packed ids [R, T], for instance the `torch_mask_tokens` of
            transformers' DataCollatorForLanguageModeling. None: labels are in the examples, or absent.
    """

    def __init__(
        self,
        row_tokens: int,
        pad_id: int,
        local_attention: int = 128,
        mask_tokens: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._row_tokens = row_tokens
        self._pad_id = pad_id
        self._half_window = local_attention // 2
        self._mask_tokens = mask_tokens

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate examples with `input_ids` [CLS and SEP included] and, if they have any, `labels` for each token.

        Returns:
            int64 `input_ids`, `position_ids` and, if there are any, `labels`, each [R, T]; and `attention_mask`, for
            each kind of layer a bool [R, 1, T, T], True where a token sees another. R depends on the lengths.

        Raises:
            ValueError: an example is empty or longer than a row.
        """
        import torch

        rows = pack([example["input_ids"] for example in examples], self._row_tokens)
        shape = (len(rows), self._row_tokens)
        ids_RT = torch.full(shape, self._pad_id)
        labels_RT = torch.full(shape, -100)
        positions_RT = torch.zeros(shape, dtype=torch.int64)
        document_RT = torch.full(shape, -1)  # the pads at the end of a row form an extra document
        for row, indices in enumerate(rows):
            at = 0
            for index in indices:
                ids = torch.as_tensor(examples[index]["input_ids"])
                span = slice(at, at + len(ids))
                ids_RT[row, span] = ids
                positions_RT[row, span] = torch.arange(len(ids))
                document_RT[row, span] = index
                if "labels" in examples[index]:
                    labels_RT[row, span] = torch.as_tensor(examples[index]["labels"])
                at += len(ids)
        if self._mask_tokens is not None:
            ids_RT, labels_RT = self._mask_tokens(ids_RT)

        place_T = torch.arange(self._row_tokens)
        near_TT = (place_T[:, None] - place_T[None, :]).abs() <= self._half_window
        same_R1TT = (document_RT[:, :, None] == document_RT[:, None, :]).unsqueeze(1)
        batch: dict[str, Any] = {
            "input_ids": ids_RT,
            "position_ids": positions_RT,
            "attention_mask": {"full_attention": same_R1TT, "sliding_attention": same_R1TT & near_TT},
        }
        if self._mask_tokens is not None or any("labels" in example for example in examples):
            batch["labels"] = labels_RT
        return batch
