"""Tasks: compute gradients and scores of a model on flat weights."""
