"""Facts about cards, links, budgets and calibration, and the verdict drawn from them."""
