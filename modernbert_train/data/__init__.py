"""From MDS shards to packed rows: shards -> shuffled documents -> greedy rows -> masked microbatches."""
