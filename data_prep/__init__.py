"""Text on disk to tokenised MDS shards."""
