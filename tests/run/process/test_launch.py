"""What is one process's work is refused to several, and torchrun's variables are read or refused in words."""

import pytest

from mpt.cli import main
from mpt.errors import ConfigError
from mpt.parallel.place import read_place
from mpt.run.process.launch import refuse_several_processes

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize("count", [None, "", "1", " 1 ", "some"])
def test_one_process_trains(monkeypatch, count):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if count is not None:
        monkeypatch.setenv("WORLD_SIZE", count)
    refuse_several_processes("this")
    assert read_place() is None


def test_what_one_process_does_is_refused_to_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="one of 4"):
        refuse_several_processes("this")


def test_variables_that_are_not_whole_are_refused_before_anything_is_written(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "nowhere.yaml"])
    assert stopped.value.code == 2
    assert "RANK is not set as torchrun sets it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_place_is_what_torchrun_says():
    place = read_place(
        {
            "WORLD_SIZE": "4",
            "RANK": "3",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "node",
            "MASTER_PORT": "29500",
        }
        | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.has_agent, place.restarts) == (
        3,
        4,
        1,
        True,
        2,
    )
