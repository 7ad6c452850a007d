"""The process around a run: signals, files, memory, operating system, launch."""
