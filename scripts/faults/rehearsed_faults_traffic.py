"""Planted faults of what goes between host and card and between ranks, for `scripts/faults/rehearse_faults.py`."""

from __future__ import annotations

from scripts.faults.rehearsed_faults import FAULTS_FILE, Fault

TRAFFIC_FILE = "tests/cuda_rehearsal/test_traffic.py"
RANKS_FILE = "tests/cuda_rehearsal/test_ranks_on_cards.py"
TWO_RANKS = (
    f"{RANKS_FILE}::test_two_ranks_on_two_cards_connect_by_their_card_and_train_as_one_process_does"
)
TRAVELLING = (
    Fault(
        "copies in flight without a bound",
        "the forward outruns the bus, and all that is offloaded is on the card again",
        "mpt/memory/offload_activations.py",
        "IN_FLIGHT = 2\n",
        "IN_FLIGHT = 10**9\n",
        f"{TRAFFIC_FILE}::test_a_forward_waits_for_copies_that_are_two_behind",
    ),
    Fault(
        "gradients leave by pageable memory",
        "the optimizer on the host waits for each gradient by itself",
        "mpt/memory/cpu_optimizer.py",
        '                        parameter.grad, device="cpu", pin_memory=copies_beside(parameter.device)\n',
        '                        parameter.grad, device="cpu"\n',
        f"{TRAFFIC_FILE}::test_a_step_on_the_host_waits_once_for_all_its_gradients",
    ),
    Fault(
        "pinned blocks are kept",
        "out of memory, pinned blocks of the sizes of the first try stay in the host's memory",
        "mpt/accelerator.py",
        "        torch._C._host_emptyCache()\n",
        "        pass\n",
        f"{FAULTS_FILE}::test_an_update_that_ran_out_of_memory_returns_pinned_blocks_too",
    ),
    Fault(
        "every missing engine is out of memory",
        "a dtype that cuDNN has no kernel for shrinks the batch to 1 and blames the memory",
        "mpt/engine/step/faults.py",
        "    if NO_ENGINE in str(error) and is_memory_short():\n",
        "    if NO_ENGINE in str(error):\n",
        f"{FAULTS_FILE}::test_cudnn_without_an_engine_is_out_of_memory_only_on_a_card_that_is_nearly_full[8-False]",
    ),
    Fault(
        "card is not named to NCCL",
        "NCCL guesses a rank's card, and connects only at the first sum",
        "mpt/parallel/ranks.py",
        "            device_id=self.card(),  # else NCCL guesses the card, and connects only at the first sum\n",
        "",
        TWO_RANKS,
    ),
    Fault(
        "sums of ranks are used early",
        "a rank steps with gradients whose sum has not arrived",
        "mpt/parallel/exchange.py",
        "            bucket.sent.wait()\n",
        "            pass\n",
        TWO_RANKS,
    ),
    Fault(
        "a task's tensors stay on the host",
        "a mean over ranks sends a task's tensor on the CPU over NCCL, which takes the card's alone",
        "mpt/parallel/ranks.py",
        "tensor.detach().to(device).float().reshape(-1) for tensor in tensors",
        "tensor.detach().float().reshape(-1) for tensor in tensors",
        f"{RANKS_FILE}::test_a_mean_over_ranks_takes_a_tasks_tensors_from_host_and_card",
        "same device",
    ),
)
