"""Running: the only package that knows Composer. Start reading at build.py."""

from modernbert_train import compat, stop_signals

compat.install()

with stop_signals.kept():  # its import would make SIGTERM and SIGINT end the process with 143 and 130
    import composer.core.engine  # noqa: F401
