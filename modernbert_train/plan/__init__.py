"""Before a run: estimate its cost, find mistakes that would end it, examine the machine, choose its speed settings.

Each estimate has its own file. No module imports torch at its top, except in `trials/`, which measures.
Imports: batch, checkpoints, clock, config, core, data, distributed, models, optim, weights.
"""
