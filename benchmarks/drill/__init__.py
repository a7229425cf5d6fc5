"""Does a run survive what happens to it? Kills, damages and starves a tiny run in every way of injuries.py.

    python -m benchmarks.drill --out drill                        # the whole; an hour
    python -m benchmarks.drill --out drill --scale quick          # some minutes
    python -m benchmarks.drill --out drill --seed 1 --only kill --round 3

Runs are started by the program's own command line and by its launcher, and always by the same command. What the
injuries know of a checkpoint is that it is a folder with a manifest. A run has survived if that command, given again,
ends in the very losses and weights of a run that nobody disturbed. Stopped, the drill goes on where it was.
"""
