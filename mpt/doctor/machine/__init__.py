"""The machine: its cards, their driver, and programs of the same name."""
