"""Running: the only package that knows Composer. Start reading at build.py."""

from modernbert_train import compat

compat.install()
