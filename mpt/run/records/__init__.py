"""The run directory: layout, lock, append-only records, environment."""
