"""Somebody's own step, executed as it stands: a function that returns it, or a whole script."""
