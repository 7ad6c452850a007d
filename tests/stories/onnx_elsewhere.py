"""A classifier as ONNX, in a program that knows onnxruntime and Pillow only, which answers as `mpt infer` does."""

import csv
import json
import subprocess
import sys
from pathlib import Path

from telling import mpt, pictures, refused, write

pictures(
    "paints",
    {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)},
    count=12,
    width=32,
)
write(
    "mine.yaml",
    """
    model: {name: small_cnn, image_size: 24, features: 8}
    dataset: {name: image_folder, root: paints}
    task: {mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.4]}
    optimizer: {name: adam, lr: 3e-3}
    train: {epochs: 6, batch_size: 8}
    name: paints
    """,
)
write(
    "elsewhere.py",
    """
import json, sys
import numpy, onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession("paints.onnx", providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
channels, height, width = json.loads(about["mpt_input_sizes"])["image"]
names, batch = json.loads(about["mpt_classes"]), []
assert about["mpt_fit"].startswith("crop")
for file in sys.argv[1:]:
    picture = Image.open(file).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side)).resize((width, height), Image.Resampling.BILINEAR)
    batch.append(numpy.asarray(picture, "float32").transpose(2, 0, 1) / 255)
probabilities = session.run(["probabilities"], {"images": numpy.stack(batch)})[0]
assert numpy.allclose(probabilities.sum(1), 1, atol=1e-5)
assert "mpt" not in sys.modules and "torch" not in sys.modules
print(json.dumps([{"label": names[int(row.argmax())], "probability": float(row.max())} for row in probabilities]))
""",
)
mpt("train mine.yaml")
mpt(
    "convert --to onnx --inside -o paints.onnx",
    "ONNX Runtime's output differs from PyTorch's by 0.00%",
)
mpt("infer --input paints --top 0 -o run.csv", "wrote 36 rows")
with Path("run.csv").open(encoding="utf-8", newline="") as stream:
    answers = list(csv.DictReader(stream))
files = [answer["input"] for answer in answers]
told = json.loads(
    subprocess.check_output([sys.executable, "-P", "elsewhere.py", *files], text=True)
)
for answer, other in zip(answers, told, strict=True):
    assert answer["label"] == other["label"], (answer, other)
    assert abs(float(answer["probability"]) - other["probability"]) < 0.02, (answer, other)
mpt("infer paints.onnx --input paints --top 0 -o alone.csv", "wrote 36 rows")
write("damaged.onnx", "ONNX?")
refused("infer damaged.onnx --input paints", "damaged.onnx: not an ONNX file", code=4)
refused("convert --to onnx -o paints.safetensors", ".onnx", code=2)
