"""Shards that others wrote, made trainable as they are."""
