"""What whole commands on a card are judged by."""

from __future__ import annotations

import json
from pathlib import Path

from mpt.doctor.card.commands import phases_left_out


def test_phases_that_took_no_step_are_named(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "losses": {"flow/error": 1.0}, "skipped": {"flow": 0, "net": 0}},
        {"kind": "evaluate", "metrics": {}},
        {"kind": "train", "losses": {"flow/error": 1.0}, "skipped": {"flow": 1, "net": 0}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert phases_left_out(tmp_path) == ["net"]
