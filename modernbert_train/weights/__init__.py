"""Weights in and out: where they come from, how they are gathered, grown, averaged, exported, described and pushed.

A format of Hugging Face is a file in `formats/` and a row, and changes alone.
Imports: checkpoints, config, core, data, models, vocabulary.
"""
