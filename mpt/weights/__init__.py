"""Files of weights that other programs wrote."""
