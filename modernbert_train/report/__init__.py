"""Show a run: a batch as text before it; banner, progress and records during it; lists and pages after it.

Training does not depend on how a line or a page looks, so each file can be changed by itself.
Imports: batch, checkpoints, clock, config, core, data, distributed, models, objectives, plan, vocabulary.
"""
