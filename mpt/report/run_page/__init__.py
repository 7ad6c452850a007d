"""The pages and pictures of one run."""
