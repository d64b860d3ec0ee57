"""What becomes of the weights after the search."""
