"""The second home of a run's checkpoints: a folder in a store, filled behind the run and read where the first is gone.

store.py       one run's folder in a store, by fsspec
copier.py      the process that copies, verifies and prunes; it watches the run's folder and knows no torch
second_home.py what the run has to do with it: start and follow the copier, bring back what this machine lacks
"""
