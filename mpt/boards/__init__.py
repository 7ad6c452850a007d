"""Displays of a run while it trains: console, TensorBoard, Weights & Biases, MLflow."""
