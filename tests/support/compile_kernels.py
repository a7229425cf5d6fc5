"""Compile the kernels of the data path once in a new clone; else each process of the tests would, for 30 seconds."""

from __future__ import annotations

import numpy as np

from modernbert_train.data.packing import Chunk, GreedyPacker
from modernbert_train.data.shuffle import ShuffledChunks

if __name__ == "__main__":
    chunks_C3 = ShuffledChunks([2], np.full(2, 40, dtype=np.int32), 1, seed=1).block(0, 0, 62)
    packer = GreedyPacker(64, window=8, max_wait=32)
    packer.place(Chunk(0, 0, 0, 10))
    packer.flush()
    packer.take_rows(1)
    two, zeros = np.array([0, 1]), np.zeros(2, dtype=np.int64)
    packer.mix_many(chunks_C3, (two, two + 1, zeros, zeros, False, two + 1, zeros.copy()), num_rows=1)
