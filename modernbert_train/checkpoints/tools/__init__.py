"""`python -m modernbert_train checkpoints`: list, verify and restore the checkpoints of a run.

selection.py the run, and the checkpoint, named on a command line; its replica
checkpoint_list.py every checkpoint in a line: its state and why it is kept; without torch
restore.py   back to an older one, and forth again
"""
