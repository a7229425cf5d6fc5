"""Keys that kernels compute for a token of a local layer, by the size of their tiles; nothing is timed.

`python -m benchmarks.window_tiles` prints a table. A kernel computes whole tiles: FlashAttention cuts each sequence
into its own, the kernel `tiles` cuts the packed line. A key costs 2 products forward; backward FlashAttention needs 5,
and `tiles`, which adds nothing atomically, 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

HALF_WINDOW = 64
PRODUCTS = {"FlashAttention": 2 + 5, "tiles": 2 + 7}


def visible_keys(lengths: Sequence[int], half: int = HALF_WINDOW) -> float:
    """Keys that a token really sees, on average."""
    seen = sum(min(n - 1, i + half) - max(0, i - half) + 1 for n in lengths for i in range(n))
    return seen / sum(lengths)


def keys_by_sequence(lengths: Sequence[int], queries: int, keys: int, half: int = HALF_WINDOW) -> float:
    """Keys computed for each token, tiles beginning with each sequence."""
    computed = 0
    for length in lengths:
        for first in range(0, length, queries):
            low, high = max(0, first - half) // keys, math.ceil(min(length, first + queries + half) / keys)
            computed += (high - low) * keys * queries
    return computed / sum(lengths)


def keys_by_line(lengths: Sequence[int], tile: int = 64, half: int = HALF_WINDOW) -> float:
    """The same of tiles of the packed line, as `tile_kernels` bounds its loops."""
    first_T = [end - n for n, end in zip(lengths, _ends(lengths), strict=True) for _ in range(n)]
    end_T = [end for n, end in zip(lengths, _ends(lengths), strict=True) for _ in range(n)]
    computed = 0
    for start in range(0, len(first_T), tile):
        last = min(start + tile, len(first_T)) - 1
        low = max(first_T[start], start - half) // tile
        computed += (math.ceil(min(end_T[last], start + tile + half) / tile) - low) * tile * tile
    return computed / len(first_T)


def _ends(lengths: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for length in lengths:
        total += length
        ends.append(total)
    return ends


def drawn(median: int, most: int, number: int = 4000) -> list[int]:
    """Lengths of documents, log-normal with a sigma of 1, cut at `most`."""
    random = Random(0)
    return [max(8, min(most, int(random.lognormvariate(math.log(median), 1)))) for _ in range(number)]


def main() -> None:
    """Print the table."""
    lines = {
        "one document of 1,024": [1024] * 96,
        "one document of 8,192": [8192] * 12,
        "median 300, at most 1,024": drawn(300, 1024),
        "median 300, at most 8,192": drawn(300, 8192),
        "median 1,000, at most 8,192": drawn(1000, 8192),
    }
    print("| documents | seen | 128 x 128 | 64 x 64 | tiles | products, 128 x 128 | tiles | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, lengths in lines.items():
        flash, tiles = keys_by_sequence(lengths, 128, 128), keys_by_line(lengths)
        products = flash * PRODUCTS["FlashAttention"], tiles * PRODUCTS["tiles"]
        print(
            f"| {name} | {visible_keys(lengths):.0f} | {flash:.0f} | {keys_by_sequence(lengths, 64, 64):.0f} | "
            f"{tiles:.0f} | {products[0]:,.0f} | {products[1]:,.0f} | {products[1] / products[0]:.2f} |"
        )


if __name__ == "__main__":
    main()
