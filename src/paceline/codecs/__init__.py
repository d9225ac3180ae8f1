"""Codecs: how an update becomes fewer bytes, and what that leaves out is added to the next one."""
