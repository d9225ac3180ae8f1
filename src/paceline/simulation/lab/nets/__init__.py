"""The nets of the lab that need more than a few lines, and the layers of all of them."""
