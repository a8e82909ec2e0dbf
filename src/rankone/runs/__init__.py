"""A run: its settings, its directory, many of them at once, and what is kept of it."""
