"""A training, from its configuration to its end."""
