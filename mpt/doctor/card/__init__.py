"""Short checks of a card during training, each in a process of its own, and the runner of them."""
