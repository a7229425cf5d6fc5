"""What happens to a document before it is tokenised."""
