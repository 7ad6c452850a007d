"""Training scripts with the libraries' networks and loops, for the changes that a plan proposes."""

from __future__ import annotations

from tests.planner.own.proposals.proposed_scripts import (
    ADAMW,
    DATA,
    DEVICE,
    LOOP,
    NET,
    PICTURES,
    TORCH,
)

HUGGING = f"import torch\nimport transformers\n\ntorch.manual_seed(0)\ndevice = {DEVICE}\n"
TOKENS = "ids = torch.randint(0, 64, (4, 24), device=device)\n"
GPT2 = """
config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=3, n_head=4)
model = transformers.GPT2LMHeadModel(config)
"""
LLAMA = """
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config)
"""
OWN = """
model.train().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    outputs = model(**batch)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LABELS = TOKENS + 'batch = {"input_ids": ids, "labels": ids}\n'
TRAINER = """

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, place):
        ids = torch.arange(24) % 64
        return {"input_ids": ids, "labels": ids}


arguments = transformers.TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=3, report_to=[], save_strategy="no",
)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
trainer.train()
"""
UNET = f"""import torch
from diffusers import DDPMScheduler, UNet2DModel

torch.manual_seed(0)
device = {DEVICE}
unet = UNet2DModel(
    sample_size=16, block_out_channels=(32, 32), layers_per_block=1, norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).to(device)
noise_scheduler = DDPMScheduler(10)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
for step in range(3):
    clean = torch.rand(2, 3, 16, 16, device=device)
    noise = torch.randn_like(clean)
    timesteps = torch.randint(0, 10, (2,), device=device)
    noisy = noise_scheduler.add_noise(clean, noise, timesteps)
    noise_pred = unet(noisy, timesteps, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(noise_pred, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ACCELERATED = (
    "from accelerate import Accelerator\n"
    + NET
    + """

def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.rand(64, 32, 128), torch.randint(0, 10, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(1):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
)
DISTRIBUTED = (
    "import os\n"
    + NET
    + f"""
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
device = {DEVICE}
x, y = torch.rand(16, 32, 128, device=device), torch.randint(0, 10, (16,), device=device)
model = nn.parallel.DistributedDataParallel(Net().to(device))
"""
    + ADAMW
    + LOOP
    + "torch.distributed.destroy_process_group()\n"
)

SCRIPTS: dict[str, str] = {
    "lstm": TORCH
    + f"""
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.out = nn.Linear(64, 5)

    def forward(self, ids):
        return self.out(self.lstm(self.embed(ids))[0])


torch.manual_seed(0)
device = {DEVICE}
model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x, y = torch.randint(0, 100, (8, 20), device=device), torch.randint(0, 5, (8, 20), device=device)
for step in range(3):
    model.zero_grad()
    scores = model(x)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
""",
    "timm_vit": "import timm\nimport timm.optim\n"
    + TORCH
    + PICTURES
    + """
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, depth=3, drop_path_rate=0.1
).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
"""
    + LOOP,
    "timm_convnext": "import timm\n"
    + TORCH
    + PICTURES
    + "model = timm.create_model('convnext_atto', num_classes=10).to(device)\n"
    + ADAMW
    + LOOP,
    "timm_resnet": "import timm\n"
    + TORCH
    + PICTURES
    + "model = timm.create_model('resnet10t', num_classes=10).to(device)\n"
    + ADAMW
    + LOOP,
    "torchvision_resnet": "import torchvision\n"
    + TORCH
    + PICTURES
    + "model = torchvision.models.resnet18(num_classes=10).to(device)\n"
    + ADAMW
    + LOOP,
    "torchvision_densenet": "import torchvision\n"
    + TORCH
    + PICTURES
    + "model = torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10).to(device)\n"
    + ADAMW
    + LOOP,
    "gpt2": HUGGING + GPT2 + LABELS + OWN,
    "gpt2_trainer": HUGGING + GPT2 + TRAINER,
    "llama": HUGGING + LLAMA + LABELS + OWN,
    "llama_lora": "import peft\n"
    + HUGGING
    + LLAMA
    + 'model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))\n'
    + LABELS
    + OWN,
    "llama_trainer": HUGGING + LLAMA + TRAINER,
    "bert": HUGGING
    + """
config = transformers.BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
)
model = transformers.BertForSequenceClassification(config)
"""
    + TOKENS
    + 'batch = {"input_ids": ids, "labels": torch.zeros(4, dtype=torch.long, device=device)}\n'
    + OWN,
    "t5": HUGGING
    + """
config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
config.decoder_start_token_id = 0
model = transformers.T5ForConditionalGeneration(config)
"""
    + LABELS
    + OWN,
    "diffusers_unet": UNET,
    "segmentation": "import segmentation_models_pytorch as smp\n"
    + TORCH
    + PICTURES.replace("(4,)", "(4, 32, 32)")
    + 'model = smp.Unet("resnet18", encoder_weights=None, classes=10).to(device)\n'
    + ADAMW
    + LOOP,
    "accelerated": ACCELERATED,
    "distributed": DISTRIBUTED,
    "lightning": "import lightning\n"
    + NET.replace("class Net(nn.Module)", "class Net(lightning.LightningModule)")
    + """
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.rand(48, 32, 128), torch.randint(0, 10, (48,)))
model = Net()
trainer = lightning.Trainer(max_epochs=1, devices=1, logger=False, enable_checkpointing=False)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
""",
    "helper_module": TORCH
    + "import networks\nfrom training import fit\n"
    + DATA
    + "model = networks.make(128).to(device)\nfit(model, x, y)\n",
    "gpt2_recomputed": HUGGING + GPT2 + "model.gradient_checkpointing_enable()\n" + LABELS + OWN,
}
FILES: dict[str, dict[str, str]] = {
    "helper_module": {
        "networks.py": NET + "\ndef make(width):\n    return Net(width)\n",
        "training.py": '''"""Trains a network."""

import torch.nn.functional as F
from torch.optim import AdamW


def losses(model, x, y):
    yield F.cross_entropy(model(x), y)


def fit(model, x, y, steps=3):
    opt = AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        opt.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward()
        opt.step()
''',
    }
}
"""Script -> its further files."""
