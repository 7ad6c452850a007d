"""Published weights of DAIN."""
