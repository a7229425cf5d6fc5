"""How good a model is: figures of one, equal on any number of ranks."""
