"""What the commands of this package share."""
