"""Copies run folders to object stores behind the run, and back on another machine."""
