"""Shared by several modes: the scaler, rounding, modules kept in float32, the base class."""
