"""Neural networks that the command line offers, and their layers."""
