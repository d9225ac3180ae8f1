"""Mistakes of a first hour, and what Paceline answers to each."""
