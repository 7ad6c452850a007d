"""From a configuration to a built run: networks, their first weights, devices, optimizers."""
