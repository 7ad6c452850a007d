"""DeepFaceLab's model files, read without running anything in them."""
