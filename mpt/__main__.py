"""`python -m mpt`."""

from mpt.cli import main

if __name__ == "__main__":
    main()
