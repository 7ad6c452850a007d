"""What a resume appends to the run's records, whatever state they are in."""

import json
from pathlib import Path

import pytest

from mpt.engine.loop.resume import write_environment
from mpt.run.records.layout import create_run


@pytest.mark.parametrize("damaged", ['{"resumes": 3}', '{"resumes": {"a": 1}}', "[1]", "{", "\x00"])
def test_a_damaged_env_json_does_not_make_a_run_unresumable(tmp_path: Path, damaged: str) -> None:
    run = create_run(tmp_path, "demo")
    run.env_path.write_text(damaged)
    write_environment(run, resumes=True)
    assert "torch" in json.dumps(json.loads(run.env_path.read_text()))
