"""What is not a run: specs of data and sweeps, translated configurations, the reference of all keys."""
