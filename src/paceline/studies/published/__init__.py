"""Published results as data, and the runs that reproduce them."""
