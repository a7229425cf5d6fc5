"""`python -m modernbert_train inspect`: show the data of a run before it starts. No Composer, no model, no GPU."""
