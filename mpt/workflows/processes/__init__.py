"""Trainings in processes of their own, several at a time."""
