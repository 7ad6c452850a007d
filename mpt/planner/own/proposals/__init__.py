"""Changes to a script with which it needs less memory."""
