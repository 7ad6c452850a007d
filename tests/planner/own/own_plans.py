"""Plans of the steps that the files of this folder build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session


def plan_of(
    session: Session, path: Path, name: str, options: dict[str, Any], **wishes: Any
) -> Plan:
    """Plan the step of a function of a file, unchanged."""
    source = {"where": str(path), "function": name, "folder": str(path.parents[3])}
    found: Plan = session.plan_own(source, options, **wishes).get().plan
    return found
