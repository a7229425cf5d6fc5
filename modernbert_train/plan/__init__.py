"""Predict the cost of a run from its configuration alone: arithmetic on a login node, without torch or a GPU."""
