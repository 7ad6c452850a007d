"""A checkpoint is of any number of processes; evaluations are one process's; what differs between ranks is named."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run as train
from mpt.commands.train import write_words
from mpt.engine.building.torch_settings import prepare_rank
from mpt.engine.loop.rank_agreement import digest_files, digest_samples
from mpt.errors import RankError
from mpt.parallel.launch import set_environment
from mpt.parallel.meeting import connect
from mpt.parallel.place import Place
from mpt.parallel.start import await_all
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.run.records.recorder import read_lines

from .forked import free_port, run_ranks
from .test_equality import Few

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 16, dropout: 0.2}
dataset: {name: digits}
precision: fp32
optimizer: {name: adam, lr: 0.003}
train: {steps: STEPS, batch_size: 12, checkpoint_every: 3, log_every: 3, evaluate_every: 3}
parallel: {timeout: 30, sync_batchnorm: true}
"""


def on_rank(
    rank: int, folder: Path, name: str, overrides: tuple[str, ...], options: dict[str, Any]
) -> str:
    own = [word.removeprefix(f"{rank}:") for word in overrides if word[:2] != f"{1 - rank}:"]
    train(
        TrainArguments(
            config=folder / "c.yaml",
            overrides=tuple(own),
            runs=str(folder / "runs"),
            name=name,
            quiet=True,
            **options,
        )
    )
    return "done"


def trained(
    folder: Path, size: int, name: str, steps: int, *overrides: str, **options: Any
) -> list[Any]:
    (folder / "c.yaml").write_text(CONFIG.replace("STEPS", str(steps)))
    if size == 1:
        for variable in ("WORLD_SIZE", "RANK"):
            os.environ.pop(variable, None)
        torch.set_num_threads(1)
        return [on_rank(0, folder, name, (*overrides, "parallel.sync_batchnorm=false"), options)]
    return run_ranks(size, on_rank, folder, name, overrides, options)


def weights(folder: Path, name: str) -> torch.Tensor:
    loaded = checkpoint.load(open_run(folder / "runs" / name))
    return torch.cat([value.float().flatten() for value in loaded.state["modules"]["net"].values()])


def test_a_resume_in_as_many_processes_is_bit_exact_and_in_another_number_equal_within_rounding(
    tmp_path: Path,
) -> None:
    """Without dropout, whose numbers are each rank's own."""
    still = ("model.dropout=0",)
    assert trained(tmp_path, 2, "whole", 6, "train.asynchronous_save=true") == ["done", "done"]
    assert trained(tmp_path, 2, "parts", 3) == ["done", "done"]
    assert trained(tmp_path, 2, "parts", 6, resume="auto", exact=True) == ["done", "done"]
    assert torch.equal(weights(tmp_path, "whole"), weights(tmp_path, "parts"))

    trained(tmp_path, 1, "alone", 6, *still)
    assert trained(tmp_path, 2, "changed", 3, *still) == ["done", "done"]
    trained(tmp_path, 1, "changed", 6, *still, resume="auto")
    torch.testing.assert_close(
        weights(tmp_path, "changed"), weights(tmp_path, "alone"), rtol=1e-3, atol=1e-4
    )
    said = [line["message"] for line in read_lines(tmp_path / "runs" / "changed" / "events.jsonl")]
    assert any("processes 2 -> 1" in message for message in said)
    summary = json.loads((tmp_path / "runs" / "whole" / "summary.json").read_text())
    assert summary["ranks"]["count"] == len(summary["ranks"]["step_seconds"]) == 2


def test_an_evaluation_that_is_shared_out_has_one_process_s_figure(tmp_path: Path) -> None:
    assert trained(tmp_path, 2, "two", 3) == ["done", "done"]
    figures = [
        line["metrics"]
        for line in read_lines(tmp_path / "runs" / "two" / "metrics.jsonl")
        if "metrics" in line
    ]
    from mpt.config.load import load_config
    from mpt.engine.building.build import build_datasets, build_run
    from mpt.engine.state.evaluation import evaluate
    from mpt.engine.state.state import restore

    config = load_config(tmp_path / "runs" / "two" / "config.yaml")
    _, test = build_datasets(config)
    run = build_run(config, torch.device("cpu"), test.spec)
    restore(run, checkpoint.load(open_run(tmp_path / "runs" / "two")).state)
    assert evaluate(run, test, config.train.batch_size) == figures[-1]


def test_every_option_reaches_each_process() -> None:
    """`--no-report` once did not."""
    plain = TrainArguments(config=Path("c.yaml"))
    own = {"nproc", "max_restarts", "print_config"}  # of the process that starts the others
    for field in dataclasses.fields(plain):
        given = {"bool": True, "tuple": ("a",)}.get(type(getattr(plain, field.name)).__name__, "7")
        changed = dataclasses.replace(plain, **{field.name: given})
        assert (write_words(changed) != write_words(plain)) == (field.name not in own), field.name


def test_settings_that_differ_between_ranks_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, 2, "differs", 3, "1:optimizer.lr=0.5") == [2, 2]
    said = capfd.readouterr().err
    assert said.count("error:") == 1
    assert "rank 1 on " in said
    assert "optimizer.lr is 0.5, not 0.003" in said
    assert not (tmp_path / "runs").exists()


def test_files_and_samples_that_differ_come_to_other_numbers(tmp_path: Path) -> None:
    """What the test above does with a setting, ranks are asked of their program and their data too."""
    (tmp_path / "a.py").write_text("x = 1\n")
    before = digest_files([tmp_path])
    (tmp_path / "a.py").write_text("x = 1  # changed\n")
    assert digest_files([tmp_path]) != before
    data, state = Few(), torch.get_rng_state()
    same, data.samples = (
        digest_samples(data),
        {**data.samples, "image": data.samples["image"].clone()},
    )
    assert digest_samples(data) == same
    data.samples["image"][32, 0, 0, 0] += 1
    assert digest_samples(data) != same
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rank_that_never_comes_is_named() -> None:
    store = HashStore()
    store.set("rank/0", "{}")
    place = Place(rank=0, size=3, local_rank=0, address="127.0.0.1", port=free_port())
    with pytest.raises(RankError, match=r"of 3 processes, rank 1, 2 did not come within 0\.1 s"):
        await_all(place, store, 0.1)


def test_an_address_that_nobody_answers_and_a_port_in_use_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpt.parallel.meeting.CONNECT_SECONDS", 0.1)
    with pytest.raises(
        RankError, match=r"MASTER_PORT=\d+: rank 1 on .* cannot reach the other processes"
    ):
        connect(
            Place(rank=1, size=2, local_rank=1, address="127.0.0.1", port=free_port()),
            is_master=False,
        )
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(RankError, match="the port is in use on this machine"):
            connect(
                Place(
                    rank=0, size=2, local_rank=0, address="127.0.0.1", port=taken.getsockname()[1]
                ),
                True,
            )


def test_another_program_at_the_port_does_not_keep_the_ranks_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch awaits the store's first answer for ever."""
    monkeypatch.setattr("mpt.parallel.meeting.CONNECT_SECONDS", 0.1)
    ended: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Place(
            rank=1, size=2, local_rank=1, address="127.0.0.1", port=silent.getsockname()[1]
        )

        def meet() -> None:
            try:
                connect(place, is_master=False)
            except RankError as error:
                ended.append(error)

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        meeting.join(5)
    assert "another program may have the port" in str(ended)


@pytest.mark.parametrize("prepare", [prepare_rank, partial(set_environment, 2)])
def test_torch_prints_no_stack_of_its_own_where_a_rank_is_lost_unless_asked(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], None]
) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_CPP_LOG_LEVEL": "INFO"})
    prepare()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    monkeypatch.setattr(os, "environ", {})
    prepare()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_four_write_one_two_and_four_go_on(tmp_path: Path, strategy: str) -> None:
    """Each time for three steps more; the end is that of one process that was never stopped."""
    words = ("model.dropout=0", f"parallel.strategy={strategy}")
    for steps, size in ((3, 4), (6, 1), (9, 2), (12, 4)):
        ends = trained(tmp_path, size, "many", steps, *words, resume="auto")
        assert ends == ["done"] * size
    trained(tmp_path, 1, "alone", 12, "model.dropout=0")
    torch.testing.assert_close(
        weights(tmp_path, "many"), weights(tmp_path, "alone"), rtol=2e-3, atol=2e-4
    )
