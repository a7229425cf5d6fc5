"""Retrieval with an encoder: contrastive training by sentence-transformers, and evaluation on BEIR folders."""
