"""`python -m mpt`."""

from mpt.entry_point import main

if __name__ == "__main__":
    main()
