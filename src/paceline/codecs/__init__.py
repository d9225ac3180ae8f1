"""Codecs compress updates; error feedback adds what one push leaves out to the next."""
