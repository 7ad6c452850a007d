"""The networks that DAIN is made of."""
