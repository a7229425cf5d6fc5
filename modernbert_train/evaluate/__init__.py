"""Figures of a model: held-out text, probes, labelled texts, fine-tuned tasks, retrieval.

An evaluation is a file and a row in evaluators.py, independent of the others. train/finetune.py trains a task of
`finetune/`.
Imports: batch, checkpoints, clock, config, core, data, distributed, import_stubs, models, objectives, plan,
report, vocabulary, weights.
"""
