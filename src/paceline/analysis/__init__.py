"""Reads run folders: status, listing, stragglers, timeline, step times."""
