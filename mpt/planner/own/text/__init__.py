"""A script's text: places, names and options in it."""
