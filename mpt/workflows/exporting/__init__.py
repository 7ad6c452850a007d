"""A trained run's networks as files for inference, whole or pruned."""
