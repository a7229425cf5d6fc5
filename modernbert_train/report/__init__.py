"""Show a run: a batch as text before it; banner, progress and records during it; lists and pages after it.

Nothing that trains depends on how a line or a page looks, so each file changes alone.
Imports: batch, checkpoints, clock, config, core, data, distributed, models, objectives, plan, vocabulary.
"""
