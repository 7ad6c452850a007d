"""ONNX graphs: watched, and stored in fewer bits."""
