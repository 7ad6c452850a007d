"""ONNX graphs: watched, stored in fewer bits, and kept only within a gate."""
