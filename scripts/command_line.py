"""A script's command line: its help is the script's own documentation."""

from __future__ import annotations

import argparse


def described(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a text as it stands."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
