"""The networks of RIFE as they were published, under their state names."""
