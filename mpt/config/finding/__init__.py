"""Parts and shipped configurations: where they are, and what they declare."""
