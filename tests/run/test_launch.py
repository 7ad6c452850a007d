"""Several processes of one training are refused until they can train together."""

import pytest

from mpt.cli import main
from mpt.errors import ConfigError
from mpt.run.launch import refuse_several_processes


@pytest.mark.parametrize("count", [None, "", "1", " 1 ", "some"])
def test_one_process_trains(monkeypatch, count):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if count is not None:
        monkeypatch.setenv("WORLD_SIZE", count)
    refuse_several_processes()


def test_torchrun_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="one of 4"):
        refuse_several_processes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "nowhere.yaml"])
    assert stopped.value.code == 2
    assert "without torchrun" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
