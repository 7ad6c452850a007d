"""YAML text as trees that remember places, and the words of mistakes."""
