"""Test whether a run survives accidents: kill, damage and starve a tiny run in every way of injuries.py.

    python -m benchmarks.drill --out drill                        # the whole drill; an hour
    python -m benchmarks.drill --out drill --scale quick          # some minutes
    python -m benchmarks.drill --out drill --seed 1 --only kill --round 3

Runs are started by the program's own command line and by its launcher, always by the same command. The injuries only
know that a checkpoint is a folder with a manifest. A run has survived if that command, repeated, ends in exactly the
losses and weights of an undisturbed run. After an interruption, the drill continues where it was.
"""
