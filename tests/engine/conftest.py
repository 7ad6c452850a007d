import pytest

import mpt.commands.memory_card
import mpt.report.page


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the report out: these tests train dozens of runs, and the page has tests of its own."""
    monkeypatch.setattr(mpt.report.page, "write_report", lambda path: None)


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the planner out: the card has tests of its own."""
    monkeypatch.setattr(mpt.commands.memory_card, "add_card", lambda message, training, arguments: message)
