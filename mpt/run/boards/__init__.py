"""Where a run is shown while it trains: console, TensorBoard, Weights & Biases, MLflow."""
