"""What a card does when mpt trains on it: short checks, each in a process of its own, and the runner of them."""
