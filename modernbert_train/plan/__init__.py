"""Before a run: its cost, the mistakes that would end it, what this machine can do, its settings of speed.

Each estimate is a file. Estimates, resolve.py and doctor.py import no torch at their top; `trials/` measures.
Imports: batch, checkpoints, clock, config, core, data, distributed, models, optim, weights.
"""
