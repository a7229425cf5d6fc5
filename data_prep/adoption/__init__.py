"""Shards of other programs, made trainable without changing them."""
