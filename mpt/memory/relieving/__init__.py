"""What each memory trick relieves, as its file says in literals."""
