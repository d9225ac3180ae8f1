"""Published tables as data, to be set beside our own rows."""
