"""From MDS shards to packed rows: shards -> shuffled documents -> greedy rows -> masked microbatches.

Storage, mixing, shuffling, planning and packing are decided here; path.py joins the stages.
Imports: batch, clock, config, core, distributed.orphans, import_hook, vocabulary.
"""
