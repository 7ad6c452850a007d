"""Images: decoding, resizing, augmentation, memory."""
