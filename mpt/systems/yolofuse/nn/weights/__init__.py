"""Published weights and pruning."""
