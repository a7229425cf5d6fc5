"""Make a paper's table with one command: run every task with every model, choice and seed."""
