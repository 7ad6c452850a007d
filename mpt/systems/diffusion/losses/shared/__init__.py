"""Training objectives: how pictures are noised, what a network is to answer, and how its answer is used."""
