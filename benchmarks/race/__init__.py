"""A race of pretraining recipes at equal compute, by a sealed protocol: see protocol.yaml and `__main__`."""
