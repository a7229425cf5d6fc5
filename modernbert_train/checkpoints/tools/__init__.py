"""`python -m modernbert_train checkpoints`: what is done with the checkpoints of a run beside training it.

selection.py the run, and the checkpoint, that a command line names; its second home
listing.py   every checkpoint in a line, with what keeps it and in which state it is; without torch
restore.py   back to an older one, and forth again
"""
