"""A run's files as plain values, whatever state they are in."""
