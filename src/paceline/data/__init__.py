"""Download, find and decode data sets, and split their samples over the workers."""
