"""Decisions after a fault: NaN, a scale at its floor, a collapse, no memory."""
