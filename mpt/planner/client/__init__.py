"""The caller's side of planning: worker processes and the session that asks them."""
