"""Data sets, how they are fetched, found and decoded, and how their samples are dealt to workers."""
