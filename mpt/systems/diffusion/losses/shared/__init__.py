"""Training objectives: how pictures are noised, the target of a network, and how its output is used."""
