"""Tokens as shards, and shards as a dataset."""
