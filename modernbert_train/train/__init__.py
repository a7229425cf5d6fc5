"""Training: the only room that knows Composer. Start reading at step.py.

What `check` asks of it (plan/resolve.py and what that imports) is imported without torch, so what Composer needs
first is done when it is imported, see import_hook.py.
Imports: batch, checkpoints, clock, config, core, data, distributed, evaluate, import_hook, models, objectives, optim,
plan, report, vocabulary, weights.
"""

from modernbert_train import import_hook

import_hook.activate()
