"""Sources of text, and the documents in them."""
