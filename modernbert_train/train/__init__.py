"""Running: the only package that knows Composer. Start reading at step.py.

What `check` asks of it (preflight.py and what that imports) is imported without torch, so what Composer needs first is
done when it is imported, see import_hook.py.
"""

from modernbert_train import import_hook

import_hook.activate()
