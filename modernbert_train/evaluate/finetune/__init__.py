"""Fine-tuning: labelled texts -> shards with labels -> a run like any other -> figures in one file."""
