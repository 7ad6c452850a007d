"""Networks that are run as they were published, and not trained here."""
