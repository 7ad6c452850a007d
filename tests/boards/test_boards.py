"""Numbers and previews on boards: TensorBoard itself, W&B and MLflow where installed, else stand-ins of what we call.

The stand-ins have the signatures of wandb 0.31 and mlflow 3.17, whose offline modes the same calls were tried against
(docs/how-to/boards.md).
"""

import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mpt.boards import feed
from mpt.boards.boards import Boards, check_installed
from mpt.errors import ConfigError
from mpt.run.records.layout import RunDirectory, create_run

pytestmark = pytest.mark.tier("fast")


SETTINGS = {"model": {"name": "dcgan", "features": 8}, "seed": 3}
ROW = {"losses": {"gen/loss": 1.5}, "samples_per_second": 40, "note": "text", "flag": True}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "run")


def preview(run: RunDirectory) -> Path:
    run.samples.mkdir(exist_ok=True)
    Image.new("RGB", (8, 4), "red").save(run.samples / "step-00000002.png")
    return run.samples / "step-00000002.png"


def fill(run: RunDirectory, name: str) -> Boards:
    boards = Boards([name], run, SETTINGS)
    boards.write(2, ROW)
    boards.picture(2, preview(run))
    return boards


def test_tensorboard_gets_numbers_and_previews(run: RunDirectory) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    boards = fill(run, "tensorboard")
    boards.close()
    assert boards.take_problems() == []
    written = next((run.path / "tensorboard").iterdir()).read_bytes()
    assert b"losses/gen/loss" in written
    assert b"samples_per_second" in written
    assert b"\x89PNG" in written
    assert b"flag" not in written


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    one = SimpleNamespace(
        log=lambda data, step=None: calls.append(("log", data, step)),
        finish=lambda: calls.append("finish"),
    )

    def init(
        *, project: str, name: str, dir: str, id: str, resume: str, config: Any, settings: Any
    ) -> Any:
        calls.append((project, name, id, resume, config))
        return one

    module: Any = ModuleType("wandb")
    module.init, module.Image, module.Settings = (
        init,
        lambda path: f"picture {Path(path).name}",
        SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_one_run_that_a_resume_goes_on_in(run: RunDirectory, wandb: list[Any]) -> None:
    fill(run, "wandb").close()
    fill(run, "wandb").close()
    (project, name, number, resume, config), first, second, end = wandb[:4]
    assert (project, name, resume, config) == ("mpt", "run", "allow", SETTINGS)
    assert first == ("log", {"losses/gen/loss": 1.5, "samples_per_second": 40.0}, 2)
    assert second == ("log", {"preview": "picture step-00000002.png"}, 2)
    assert end == "finish"
    assert wandb[4][2] == number


class Client:
    """What of mlflow's client is called, keeping what it is given."""

    def __init__(self, tracking_uri: str) -> None:
        self.uri, self.calls = tracking_uri, CALLS

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return f"experiment {name}"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.calls.append(("run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls.append((run_id, [*metrics, *params]))

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> None:
        self.calls.append((run_id, Path(local_path).name, artifact_path))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append((run_id, "ended"))


CALLS: list[Any] = []


def test_mlflow_gets_settings_once_and_numbers_by_step(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLS.clear()
    parts: dict[str, Any] = {
        name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")
    }
    parts["mlflow.entities"].Metric = lambda key, value, timestamp, step: (key, value, step)
    parts["mlflow.entities"].Param = lambda key, value: (key, value)
    parts["mlflow.tracking"].MlflowClient = Client
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    fill(run, "mlflow").close()
    assert CALLS == [
        ("run", "experiment mpt", "run"),
        ("abc", [("model.name", "dcgan"), ("model.features", "8"), ("seed", "3")]),
        ("abc", [("losses/gen/loss", 1.5, 2), ("samples_per_second", 40.0, 2)]),
        ("abc", "step-00000002.png", "samples"),
        ("abc", "ended"),
    ]
    fill(run, "mlflow").close()
    assert [call for call in CALLS if call[0] == "run"] == CALLS[:1]


def test_a_board_that_fails_is_left_out_and_the_others_go_on(
    run: RunDirectory, wandb: list[Any]
) -> None:
    module: Any = sys.modules["wandb"]
    module.Image = lambda path: 1 / 0
    boards = fill(run, "wandb")
    boards.write(3, ROW)
    boards.close()
    assert boards.take_problems() == [
        "Weights & Biases gets nothing more of this run: division by zero"
    ]
    assert boards.take_problems() == []
    assert wandb[-1][2] == 2


def test_a_board_that_ends_the_program_is_left_out(run: RunDirectory, wandb: list[Any]) -> None:
    module: Any = sys.modules["wandb"]
    module.Image = lambda path: sys.exit("wandb: quota exceeded")
    boards = fill(run, "wandb")
    boards.close()
    assert boards.take_problems() == [
        "Weights & Biases gets nothing more of this run: wandb: quota exceeded"
    ]


def test_a_board_that_hangs_holds_nobody_up(
    run: RunDirectory, wandb: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = sys.modules["wandb"]
    released = threading.Event()
    module.Image = lambda path: released.wait(60)
    monkeypatch.setattr(feed, "CALL_SECONDS", 0.2)
    started = time.monotonic()
    boards = fill(run, "wandb")
    assert time.monotonic() - started < 5
    problems = boards.take_problems()
    while not problems and time.monotonic() - started < 30:
        time.sleep(0.05)
        problems = boards.take_problems()
    (said,) = problems
    assert said == "Weights & Biases gets nothing more of this run: it has not answered for 0 s"
    boards.close()
    assert boards.take_problems() == []
    released.set()


@pytest.mark.parametrize(("hurried", "limit"), [(False, "END_SECONDS"), (True, "HURRIED_SECONDS")])
def test_the_end_waits_for_a_board_only_so_long(
    run: RunDirectory, wandb: list[Any], monkeypatch: pytest.MonkeyPatch, hurried: bool, limit: str
) -> None:
    module: Any = sys.modules["wandb"]
    released = threading.Event()
    module.Image = lambda path: released.wait(60)
    monkeypatch.setattr(feed, limit, 0.1)
    boards = fill(run, "wandb")
    boards.close(lambda: hurried)
    (said,) = boards.take_problems()
    assert said.endswith("it did not take the last lines within 0 s")
    released.set()


def test_a_picture_that_is_gone_when_its_turn_comes_is_passed_over(
    run: RunDirectory, wandb: list[Any]
) -> None:
    boards = Boards(["wandb"], run, SETTINGS)
    boards.picture(2, run.samples / "step-00000002.png")
    boards.write(3, ROW)
    boards.close()
    assert boards.take_problems() == []
    assert [call[0] for call in wandb[1:2]] == ["log"]


def test_a_board_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpt.boards.boards.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"MLflow is not installed: `pip install mlflow`"):
        check_installed(["mlflow"])


def test_mlflow_without_a_database_says_what_to_install(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("mlflow", "mlflow.entities", "mlflow.tracking"):
        module = ModuleType(name)
        module.__dict__.update(Metric=None, Param=None, MlflowClient=lambda tracking_uri: 1 / 0)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("mpt.boards.mlflow_board.find_spec", lambda name: None)
    boards = fill(run, "mlflow")
    boards.close()
    (said,) = boards.take_problems()
    assert "pip install sqlalchemy alembic" in said


@pytest.mark.tier("full")
# of SQLAlchemy, in what MLflow asks of it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_library_itself_takes_a_run_offline(
    name: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        boards = fill(run, name)
        boards.close()
        assert boards.take_problems() == []
    assert (
        list((run.path / "wandb").glob("offline-run-*"))
        if name == "wandb"
        else (run.path / "mlflow.db").is_file()
    )
