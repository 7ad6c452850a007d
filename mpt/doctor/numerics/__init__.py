"""What a precision mode does to a step, and the smallest cure."""
