"""One update: micro-batches, losses, ranks, the finite check."""
