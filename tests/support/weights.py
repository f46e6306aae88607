"""Weights that are replaced while the engine serves, by vLLM's own ways."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from safetensors.torch import load_file
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.utils import default_unquantized_gemm
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from bench.corpus import held_out_prompts
from bench.workers.engine import drafter_of
from mtp.fusion import blocks, gemms
from mtp.fusion.gemms import weight_of_both
from proposers.models.step3p5_modules import run_module
from tests.support.scenarios import greedy, metrics, runner

BACKEND = "handed over"

Weights = dict[str, torch.Tensor]


@dataclass
class GivenWeights(WeightTransferUpdateInfo):
    weights: list[tuple[str, torch.Tensor]]


class GivenWeightsEngine(IPCWeightTransferEngine):
    """vLLM's engine for weights of a process on the same host, and nothing to bring them through.

    What is done with the model before and after they come, and how it loads them, is vLLM's own.
    """

    update_info_cls = GivenWeights

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with disable_mtp_completeness_check():
            self.model.load_weights(self.parse_update_info(update_info).weights)


def _register_backend() -> None:
    WeightTransferEngineFactory.register_engine(BACKEND, GivenWeightsEngine)


ENGINE = {"weight_transfer_config": {"backend": BACKEND}}


def update(llm: LLM, start: str, weights: Weights) -> None:
    """In two chunks, as a trainer sends them.

    Args:
        start: vLLM's method that begins the update.
    """
    llm.collective_rpc(start)
    items = list(weights.items())
    for chunk in (items[::2], items[1::2]):
        llm.collective_rpc("update_weights", kwargs={"update_info": {"weights": chunk}})
    llm.collective_rpc("finish_weight_update")
    llm.reset_prefix_cache()  # its rows are of the weights before


def weights_of(llm: LLM, draft: bool) -> Weights:
    """Those in the checkpoint that are the draft's own, or the target's.

    Without those of experts: on a CPU vLLM makes others of them at a reload than at the start, with or without us.
    """
    config = llm.llm_engine.vllm_config.model_config
    first, stored = config.hf_config.num_hidden_layers, load_file(Path(config.model, "model.safetensors"))
    is_draft = {name: _layer(name) >= first or ".mtp." in name for name in stored}
    return {name: x for name, x in stored.items() if is_draft[name] == draft and ".moe." not in name}


def _layer(name: str) -> int:
    _, is_layer, rest = name.partition("layers.")
    return int(rest.partition(".")[0]) if is_layer else -1


def noise(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.05 * torch.randn(x.shape, generator=generator).to(x) for name, x in weights.items()}


def play(llm: LLM, steps: dict[str, Callable[[], None]], max_tokens: int) -> dict[str, Any]:
    """The same prompts after each of the steps: tokens, accepted drafts, and passes that were replayed."""
    drafter, result = drafter_of(runner(llm)), {}
    replay = Mock()
    if drafter.graphs is not None:
        drafter.graphs.replay = replay = Mock(wraps=drafter.graphs.replay)
    prompts = [text[: 20 + 20 * i] for i, text in enumerate(held_out_prompts(llm.get_tokenizer(), 4, 100))]
    for name, step in steps.items():
        step()
        replay.reset_mock()
        accepted = metrics(llm)["spec_decode_num_accepted_tokens"]
        tokens = greedy(llm, prompts, max_tokens)
        accepted = metrics(llm)["spec_decode_num_accepted_tokens"] - accepted
        result[name] = {"tokens": tokens, "accepted": accepted, "replays": replay.call_count}
    return result


def updated(llm: LLM, which: str, max_tokens: int) -> dict[str, Any]:
    """The same prompts with the weights of the checkpoint, with noise in their place, and with those again.

    Args:
        which: "draft" or "target", both by an update; "reload": the target's, which come back by `reload_weights`.
    """
    weights = weights_of(llm, which == "draft")
    start = "start_draft_weight_update" if which == "draft" else "start_weight_update"
    addresses = {name: tensor.data_ptr() for name, tensor in _tensors(llm)}

    def put_back() -> None:
        if which == "reload":
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            llm.reset_prefix_cache()
        else:
            update(llm, start, weights)

    steps: dict[str, Callable[[], None]] = {
        "before": lambda: None,
        "noise": lambda: update(llm, start, noise(weights)),
        "after": put_back,
        "after again": put_back,
    }
    result = play(llm, steps, max_tokens)
    model = drafter_of(runner(llm)).model
    return result | {
        "moved": [name for name, tensor in _tensors(llm) if tensor.data_ptr() != addresses[name]],
        "fused": getattr(model.forward, "func", None) is run_module and drafter_of(runner(llm)).takes_wanted,
    }


updated.prepare = _register_backend


def updated_as_with_kernels(llm: LLM, which: str, max_tokens: int) -> dict[str, Any]:
    """The same with layers as on a GPU, where nothing is packed and two GEMMs of a module can be one."""
    attention = [module.mtp_block.self_attn for module in drafter_of(runner(llm)).model.model.layers.values()]

    def one_gemm() -> list[bool]:
        return [weight_of_both(x.qkv_proj, x.g_proj) is not None for x in attention]

    return {"one GEMM": one_gemm(), **updated(llm, which, max_tokens), "one GEMM after": one_gemm()}


def _register_backend_as_with_kernels() -> None:
    _register_backend()
    linear.dispatch_unquantized_gemm = lambda backend: default_unquantized_gemm
    linear.UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None
    gemms.has_kernels = blocks.has_kernels = lambda x: True


updated_as_with_kernels.prepare = _register_backend_as_with_kernels


def slept(llm: LLM) -> dict[str, Any]:
    """Before and after a sleep that forgets all weights, from which those of the checkpoint are loaded again."""

    def sleep() -> None:
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")  # the target's
        update(llm, "start_draft_weight_update", weights_of(llm, draft=True))

    return play(llm, {"before": lambda: None, "after": sleep}, max_tokens=40)


slept.prepare = _register_backend


def _tensors(llm: LLM) -> Iterable[tuple[str, torch.Tensor]]:
    """What captured passes know by its address."""
    model = drafter_of(runner(llm)).model
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def assert_served_on(value: dict[str, Any], which: str) -> None:
    """Of what `updated` returned: new weights were used, and the old ones draft as before."""
    before, noise = value["before"], value["noise"]
    assert value["fused"]
    assert before["accepted"] > 0
    if which == "draft":
        assert noise["tokens"] == before["tokens"]
        assert noise["accepted"] < before["accepted"] / 4
    else:
        assert noise["tokens"] != before["tokens"]
    assert value["after"] == value["after again"] == before
    assert value["moved"] == [], "captured passes read the old places"
