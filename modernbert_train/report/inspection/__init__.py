"""`python -m modernbert_train inspect`: what a run is fed, before it is run. No Composer, no model, no GPU."""
