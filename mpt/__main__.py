"""`python -m mpt`."""

import sys

from mpt.planner.processes import start_ahead

if __name__ == "__main__":
    try:
        start_ahead(sys.argv[1:])

        from mpt.cli import main

        main()
    except KeyboardInterrupt:  # while the command line was being imported
        exec("")  # Python forgets one that came while it ran a string, for which it would end by the signal
        print("interrupted", file=sys.stderr)
        sys.exit(130)
