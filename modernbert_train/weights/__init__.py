"""Weights in and out: open, gather, grow, average, export, describe and push them.

Each Hugging Face format is one file in `formats/` and one row of a table.
Imports: checkpoints, config, core, data, models, vocabulary.
"""
