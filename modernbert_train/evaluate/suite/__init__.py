"""A paper's table by one command: many tasks, of each the runs of every model, choice and seed."""
