"""Write tokens as shards, and shards as a dataset."""
