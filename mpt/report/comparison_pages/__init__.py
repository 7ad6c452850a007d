"""The pages and pictures of comparisons and sweeps."""
