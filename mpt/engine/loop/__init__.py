"""The training loop and its side jobs: assembly, saving, resume, rollback, the summary at the end."""
