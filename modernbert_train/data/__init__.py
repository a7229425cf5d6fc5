"""From MDS shards to packed rows: shards -> shuffled documents -> greedy rows -> masked microbatches.

What is stored, mixed, shuffled, planned or packed changes here alone; path.py joins the stages.
Imports: batch, clock, config, core, distributed.orphans, import_hook, vocabulary.
"""
