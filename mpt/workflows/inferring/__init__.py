"""What half weights gain in inference, and the batch that fits."""
