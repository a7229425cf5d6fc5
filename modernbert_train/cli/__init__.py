"""The command line: `verbs.py` has a row for each verb; its arguments and its call are in the file of its group.

A verb's words and arguments are defined only here; another package does its work.
Imports: checkpoints, config, core, data, distributed, evaluate, plan, report, train, weights.
"""
