"""A training is stopped by Ctrl-C and by kill -9, goes on, and is extended; it ends as one that was never stopped."""

import signal
from pathlib import Path

from telling import mpt, refused, start, write

write(
    "digits.yaml",
    """
    model: {name: small_cnn, image_size: 16, features: 8}
    dataset: {name: digits}
    train: {steps: 120, batch_size: 32, log_every: 5, checkpoint_every: 20, evaluate_every: 40, threads: 1}
    name: digits
    """,
)


def stop_at(step: int, number: signal.Signals, words: str) -> tuple[int, str]:
    """Start a training, send it a signal when it has logged a step, and return how it ended and what it said."""
    training, said = start(words), []
    assert training.stdout is not None
    for line in training.stdout:
        said.append(line)
        if f"  step {step}/" in line:
            training.send_signal(number)
    return training.wait(60), "".join(said)


code, said = stop_at(25, signal.SIGINT, "train digits.yaml")
assert code == 130, said
assert "--resume" in said, said
assert "Traceback" not in said, said
code, said = stop_at(70, signal.SIGKILL, "train digits.yaml --resume")
assert code == -signal.SIGKILL, said
code, said = stop_at(100, signal.SIGTERM, "train digits.yaml --resume")
assert code == 143, said
mpt("train digits.yaml --resume", "step 120/120", "done: accuracy")
# and a little further
mpt("train digits.yaml --resume train.steps=140", "step 140/140", "done: accuracy")
mpt("train digits.yaml train.steps=140 name=straight")
mpt("diff runs/digits runs/straight --only-files")
assert [path.name for path in Path("runs").iterdir() if path.is_dir()].count("digits") == 1

training = start("train digits.yaml --smoke 100000 name=smoke")
assert training.stdout is not None
for line in training.stdout:
    if "  step " in line:
        training.terminate()
assert training.wait(60) == 143
refused("train digits.yaml --resume runs/nowhere", "nowhere", code=4)
