"""All runs of a folder as one page and one table."""
