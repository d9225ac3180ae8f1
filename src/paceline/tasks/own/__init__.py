"""Checks of a user's own task: its data, and one trial step."""
