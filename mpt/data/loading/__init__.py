"""From a data set to batches: order, workers, balance, missing files."""
