"""`python -m mpt`."""

import sys

from mpt.planner.processes import start_ahead

if __name__ == "__main__":
    start_ahead(sys.argv[1:])

    from mpt.cli import main

    main()
