"""The command line: `verbs.py` has a row for each verb; its arguments and its call are in the file of its group.

The words and arguments of a verb change here alone; another room does its work.
Imports: checkpoints, config, core, data, evaluate, plan, report, train, weights.
"""
