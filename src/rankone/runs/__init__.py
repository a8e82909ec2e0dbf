"""A run directory: what is in it, how it is made, and what is kept of it."""
