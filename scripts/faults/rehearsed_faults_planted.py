"""Faults that pass on a CPU and fail, or mislead, on CUDA: planted in mpt's own code paths, none was ever in it.

By kind: work that nothing orders, waits in steps, what CUDA's kernels refuse, CUDA's numbers, runs. Those that no
rehearsal can notice stand at the end, each with the reason.
"""

from __future__ import annotations

from scripts.faults.rehearsed_faults import COMMANDS_FILE, CONFIGS_FILE, FAULTS_FILE, Fault
from scripts.faults.rehearsed_faults_traffic import TRAVELLING

DEVICE_FILE = "tests/cuda_rehearsal/test_device.py"
MODES_FILE = "tests/cuda_rehearsal/test_modes_and_tricks.py"
RUNS_FILE = "tests/cuda_rehearsal/test_runs.py"
LOADER = "mpt/data/loading/loader.py"
WATCH = "mpt/engine/step/loss_watch.py"
OFFLOAD = "mpt/memory/offload_activations.py"
TRAFFIC = "mpt/memory/travelling/weight_traffic.py"
SCALER = "mpt/precision/shared/scaler.py"
PRODUCTS = "mpt/precision/shared/products.py"
LADDER = "mpt/engine/recovery/out_of_memory.py"

EARLY = r"uses what .* without waiting for it"
READ_EARLY = r"on the host reads page-locked memory .* without waiting for it"
FREED = r"is freed while .* record_stream or a wait is missing"
WAITS = r"these lines make the host wait in the steps"

PLAIN = f"{MODES_FILE}::test_a_mode_trains_resumes_and_infers[fp32]"
OFFLOADED = f"{MODES_FILE}::test_a_trick_trains[classifier-offload_activations: 0.0]"
STREAMED = f"{MODES_FILE}::test_a_trick_trains[classifier-stream_weights: {{min_kibibytes: 0}}]"
HOST_STEP = f"{MODES_FILE}::test_a_trick_trains[classifier-cpu_optimizer: true]"
CONFIG = f"{CONFIGS_FILE}::test_a_config_trains_as_planned_and_without_waiting"
RETRY = f"{RUNS_FILE}::test_an_update_that_is_repeated_begins_with_no_more_memory"
RESUMED = f"{RUNS_FILE}::test_a_resume_with_a_trick_goes_on_bit_for_bit"

ORDER = (
    Fault(
        "batch is used early",
        "the step reads a batch whose copy may not be done",
        LOADER,
        "    current.wait_event(copied)\n",
        "",
        PLAIN,
        EARLY,
    ),
    Fault(
        "batch is freed early",
        "the copying stream writes the next batch over one that the step still reads",
        LOADER,
        "        tensor.record_stream(current)\n",
        "        pass\n",
        f"{RUNS_FILE}::test_a_batch_is_kept_until_the_backward_has_read_it",
        FREED,
    ),
    Fault(
        "batch's event is early",
        "the event that the step waits for is recorded before the copy",
        LOADER,
        "            following = (to_device(batch, device, spec), copying.record_event())\n",
        "            copied = copying.record_event()\n"
        "            following = (to_device(batch, device, spec), copied)\n",
        PLAIN,
        EARLY,
    ),
    Fault(
        "loss is read early",
        "the host reads the loss before it has arrived, and takes a NaN for a number",
        WATCH,
        "        self.copied.synchronize()\n",
        "",
        PLAIN,
        READ_EARLY,
    ),
    Fault(
        "loss's event is early",
        "the event that the host waits for is recorded before the loss is copied",
        WATCH,
        "        self.host.copy_(self.total.reshape(()), non_blocking=True)\n"
        "        self.copied = torch.Event(self.device)\n"
        "        self.copied.record()\n",
        "        self.copied = torch.Event(self.device)\n"
        "        self.copied.record()\n"
        "        self.host.copy_(self.total.reshape(()), non_blocking=True)\n",
        PLAIN,
        READ_EARLY,
    ),
    Fault(
        "activation leaves early",
        "an activation is copied to the host before it is computed",
        OFFLOAD,
        "        stream.wait_stream(torch.accelerator.current_stream(self.device))\n        with stream",
        "        with stream",
        OFFLOADED,
        EARLY,
    ),
    Fault(
        "activation is freed early",
        "the forward computes over an activation that is still being copied",
        OFFLOAD,
        "                torch.accelerator.current_stream(tensor.device).wait_event(left)\n",
        "                pass\n",
        OFFLOADED,
        FREED,
    ),
    Fault(
        "activation returns into used memory",
        "a copy back overwrites memory that the backward still reads",
        OFFLOAD,
        "        self.stream.wait_stream(torch.accelerator.current_stream(self.device))\n        with self",
        "        with self",
        OFFLOADED,
        EARLY,
    ),
    Fault(
        "activation is used early",
        "the backward reads an activation before it is back",
        OFFLOAD,
        "            torch.accelerator.current_stream(self.device).wait_event(arrived)\n",
        "            pass\n",
        OFFLOADED,
        EARLY,
    ),
    Fault(
        "weights arrive in used memory",
        "a block's weights overwrite memory that the block before still uses",
        TRAFFIC,
        "        side.wait_stream(torch.accelerator.current_stream(self.device))\n        with side",
        "        with side",
        STREAMED,
        EARLY,
    ),
    Fault(
        "weights are used early",
        "a block computes with weights that are still on their way",
        TRAFFIC,
        "            torch.accelerator.current_stream(self.traffic.device).wait_event(self.arrived)\n",
        "            pass\n",
        STREAMED,
        EARLY,
    ),
    Fault(
        "gradients leave early",
        "a gradient is copied to the host before it is computed",
        TRAFFIC,
        "            side.wait_stream(torch.accelerator.current_stream(self.device))\n            with side",
        "            with side",
        STREAMED,
        EARLY,
    ),
    Fault(
        "gradients are read early",
        "the host's optimizer reads gradients that are still on their way",
        TRAFFIC,
        "            side.synchronize()\n",
        "            pass\n",
        STREAMED,
        READ_EARLY,
    ),
    Fault(
        "gradients are freed early",
        "the backward computes over a gradient that is still being copied",
        TRAFFIC,
        "                torch.accelerator.current_stream(self.device).wait_event(event)\n",
        "                pass\n",
        STREAMED,
        FREED,
    ),
    Fault(
        "checkpoint is written early",
        "a checkpoint in the background is written from copies that have not arrived",
        "mpt/run/checkpoints/background_save.py",
        "            torch.accelerator.current_stream(device).synchronize()\n",
        "            pass\n",
        f"{RUNS_FILE}::test_a_save_in_the_background_holds_what_a_save_at_once_holds",
        READ_EARLY,
    ),
    Fault(
        "host steps early",
        "the optimizer on the host steps with gradients that have not arrived",
        "mpt/memory/cpu_optimizer.py",
        "            torch.accelerator.current_stream(device).synchronize()\n        self.inner",
        "            pass\n        self.inner",
        HOST_STEP,
        READ_EARLY,
    ),
)
WAITING = (
    Fault(
        "loss is asked for twice",
        "the host waits twice per update for the one question",
        WATCH,
        "        return watch.saw_finite()\n",
        "        return watch.saw_finite() and watch.saw_finite()\n",
        f"{CONFIG}[dcgan_fp32]",
        WAITS,
    ),
    Fault(
        "gradients are asked one by one",
        "unscaling asks each group of gradients once more whether it is finite",
        SCALER,
        "        agree_on_shards(parameters, found)\n",
        "        any(bool(gradients[0].isfinite().all()) for gradients in groups.values())\n"
        "        agree_on_shards(parameters, found)\n",
        f"{CONFIG}[classify_digits]",
        WAITS,
    ),
    Fault(
        "losses are read in each step",
        "each step waits for its losses, although no line is written",
        "mpt/engine/loop/training.py",
        "        progress.add_losses(phase, done)\n",
        "        progress.add_losses(phase, done)\n"
        "        self.last_losses = {name: float(loss) for name, loss in done.losses.items()}\n",
        f"{CONFIG}[classify_digits]",
        WAITS,
    ),
    Fault(
        "steps are tracked on a card",
        "a step's memory is tracked as on a CPU, with two waits around it, in what belongs to `mpt/run`",
        "mpt/engine/loop/training.py",
        'if run.device.type == "cpu" and not run.world.is_sharded:\n            self.progress',
        "if not run.world.is_sharded:\n            self.progress",
        f"{CONFIG}[classify_digits]",
        WAITS,
    ),
    Fault(
        "activations leave by pageable memory",
        "each activation that is offloaded stops the host until it has left",
        OFFLOAD,
        'device="cpu", pin_memory=stream is not None)',
        'device="cpu")',
        f"{CONFIGS_FILE}::test_activations_that_travel_take_what_was_planned",
        WAITS,
    ),
)
REFUSED = (
    Fault(
        "inverse scale on the host",
        "the unscaling kernel takes the inverse of the scale from the device alone",
        SCALER,
        "                torch.full((), 1.0 / self.scale, device=device)\n                if",
        "                torch.full((), 1.0 / self.scale)\n                if",
        f"{CONFIG}[classify_digits]",
        "inv_scale must be a CUDA tensor",
    ),
    Fault(
        "overflow's flag on the host",
        "the unscaling kernel writes its flag on the device alone",
        SCALER,
        "                found[device] = torch.zeros((), device=device)\n",
        "                found[device] = torch.zeros(())\n",
        f"{CONFIG}[classify_digits]",
        "found_inf must be a CUDA tensor|two devices",
    ),
    Fault(
        "product of integers",
        "CUDA multiplies no matrices of int64",
        "mpt/tasks/classify.py",
        '        return {"logits": self.logits(batch["image"]), "labels": batch["label"]}\n',
        '        labels = batch["label"]\n'
        "        labels = torch.eye(len(labels), dtype=labels.dtype, device=labels.device) @ labels\n"
        '        return {"logits": self.logits(batch["image"]), "labels": labels}\n',
        PLAIN,
        "addmv_impl_cuda.* not implemented for 'Long'",
    ),
)
NUMBERS = (
    Fault(
        "NaN becomes -0",
        "rounding at random carries CUDA's NaN, 0x7FFFFFFF, into the sign",
        "mpt/precision/shared/rounding.py",
        "    return numbers.view(torch.int16)[1::2].view(torch.bfloat16).masked_fill_(is_nan, torch.nan)\n",
        "    return numbers.view(torch.int16)[1::2].view(torch.bfloat16)\n",
        f"{DEVICE_FILE}::test_stochastic_rounding_keeps_a_nan_of_cuda",
    ),
    Fault(
        "float64 in a loss",
        "a loss is computed in float64, 32 to 64 times as slow on most cards",
        "mpt/losses/shared/variational.py",
        "    mean, log_variance = mean.float(), log_variance.float()\n",
        "    mean, log_variance = mean.double(), log_variance.double()\n",
        f"{CONFIG}[vae]",
        "these lines take float64 in the steps",
    ),
    Fault(
        "losses in half",
        "autocast is switched off for the CPU while a loss is computed, and goes on for the card",
        "mpt/precision/shared/float32_modules.py",
        "        torch.set_autocast_enabled(device_type, False)\n",
        '        torch.set_autocast_enabled("cpu", False)\n',
        f"{MODES_FILE}::test_losses_are_computed_in_float32_on_the_card",
    ),
    Fault(
        "TF32 in fp32",
        "convolutions of the mode fp32 round to TF32, as torch's own default has it",
        PRODUCTS,
        'torch.backends.cudnn.allow_tf32 = settings.matmul in ("auto", "tf32")',
        "torch.backends.cudnn.allow_tf32 = True",
        PLAIN,
    ),
    Fault(
        "no TF32 in tf32",
        "matrix products of the mode tf32 stay in float32, and are slow",
        PRODUCTS,
        'torch.backends.cuda.matmul.allow_tf32 = settings.matmul == "tf32"',
        "torch.backends.cuda.matmul.allow_tf32 = False",
        f"{MODES_FILE}::test_a_mode_trains_resumes_and_infers[tf32]",
    ),
    Fault(
        "channels last is left",
        "a network leaves the layout of its weights, and each further layer transposes",
        "mpt/nn/dcgan.py",
        "        logit_b: Tensor = self.layers(image_bchw).flatten()\n",
        "        for layer in self.layers:\n"
        "            image_bchw = layer(image_bchw).contiguous()\n"
        "        logit_b: Tensor = image_bchw.flatten()\n",
        f"{MODES_FILE}::test_images_stay_channels_last_behind_the_first_weights_that_are",
    ),
)
RUNS = (
    Fault(
        "worker touches the card",
        "a data worker, which is a fork, uses the card",
        "mpt/data/loading/workers.py",
        "        batch = fetch(dataset, indices, epoch, looks)\n",
        "        batch = {name: one.pin_memory() for name, one in fetch(dataset, indices, epoch, looks).items()}\n",
        f"{RUNS_FILE}::test_workers_are_forked_while_the_card_is_in_use",
        "forked",
    ),
    Fault(
        "card's random state is not saved",
        "a resumed run draws other numbers on the card",
        "mpt/engine/state/state.py",
        "        state[device.type] = own\n",
        "        pass\n",
        f"{FAULTS_FILE}::test_a_resume_restores_the_devices_random_state",
    ),
    Fault(
        "host optimizer forgets",
        "a resume with the optimizer on the host begins with an empty state",
        "mpt/memory/cpu_optimizer.py",
        "        self.inner.load_state_dict(state_dict)\n",
        "",
        f"{RESUMED}[cpu_optimizer: true]",
    ),
    Fault(
        "copies on the first card",
        "a run on the second card copies its batches by a stream of the first",
        LOADER,
        "    copying = torch.Stream(device)",
        '    copying = torch.Stream(torch.device("cuda", 0))',
        f"{RUNS_FILE}::test_figures_of_a_run_on_the_second_card_stay_there[vae]",
    ),
    Fault(
        "ranks share a card",
        "all ranks of a machine work on its first card",
        "mpt/parallel/start.py",
        "        torch.cuda.set_device(place.local_rank)\n",
        "        torch.cuda.set_device(0)\n",
        "tests/cuda_rehearsal/test_ranks_on_cards.py"
        "::test_a_rank_works_on_the_card_of_its_number_and_opens_no_context_on_another[1]",
    ),
    Fault(
        "error keeps the graph",
        "out of memory, the error is kept, whose traceback holds the forward that was too much",
        LADDER,
        "                self.snapshot = snapshot_of(run.device)\n",
        "                self.snapshot, self.error = snapshot_of(run.device), error\n",
        RETRY,
    ),
    Fault(
        "gradients outlive a failed update",
        "out of memory, the update is repeated beside the gradients of the first try",
        LADDER,
        "    phase.optimizer.zero_grad(set_to_none=True)\n    phase.module.zero_grad(set_to_none=True)\n",
        "",
        RETRY,
    ),
)
LIMITS = (
    Fault(
        "kernels in any order",
        "cuDNN takes kernels that add in any order, and a resume does not repeat",
        "mpt/engine/building/torch_settings.py",
        "torch.backends.cudnn.deterministic = config.train.deterministic",
        "torch.backends.cudnn.deterministic = False",
        f"{FAULTS_FILE}::test_a_resume_restores_the_devices_random_state",
        limit="which of its kernels cuDNN takes is not modelled: results here always repeat",
    ),
    Fault(
        "kernels are measured anew",
        "cuDNN measures its kernels at each start, with workspaces that no plan knows",
        "mpt/engine/building/torch_settings.py",
        "torch.backends.cudnn.benchmark = not config.train.deterministic",
        "torch.backends.cudnn.benchmark = True",
        f"{CONFIG}[classify_digits]",
        limit="cuDNN's workspaces are not modelled; scripts/gpu_check.py measures them",
    ),
    Fault(
        "cache is kept after a refusal",
        "out of memory, segments of the sizes of the first try stay reserved for the second",
        LADDER,
        "    accelerator.empty_cache(run.device)\n",
        "",
        f"{COMMANDS_FILE}::test_a_run_that_is_too_large_takes_the_ladder",
        limit="the allocator gives its cache back before it refuses, here as on a GPU: only fragments would tell",
    ),
)
PLANTED = (*ORDER, *WAITING, *REFUSED, *NUMBERS, *RUNS, *TRAVELLING, *LIMITS)
