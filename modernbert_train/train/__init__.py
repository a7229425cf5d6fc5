"""Training: the only package that imports Composer. Start reading at step.py.

`check` imports plan/resolve.py without torch. Composer needs some setup before its first import; that happens when this
package is imported, see import_hook.py.
Imports: batch, checkpoints, clock, config, core, data, distributed, evaluate, import_hook, models, objectives, optim,
plan, report, vocabulary, weights.
"""

from modernbert_train import import_hook

import_hook.activate()
