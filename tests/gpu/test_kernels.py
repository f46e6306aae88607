"""The kernels against their PyTorch versions, on poisoned outputs and fresh random inputs."""

import dataclasses
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.fusion.layers import fuse_gemma_norms
from mtp.groups import KVGroup
from mtp.kernels import decoder
from mtp.kernels.static_inputs import StaticInputs, fill_static_inputs_by_ops
from mtp.kernels.window import read_following, read_following_by_ops
from mtp.rows import PassInputs, StepRows
from mtp.slots import write_slot_mappings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 7_777_777
MAX_NUM_TOKENS = 1500


def make_group(gid: int, num_reqs: int) -> KVGroup:
    """Entries past a table's end are another's, and so large that following one leaves memory."""
    block_size = (16, 32, 48, 2**30)[gid % 4]
    width, more = (int(x) for x in torch.randint(1, 40, (2,)))
    table = torch.full((num_reqs, width + more), 2**31 - 1, dtype=torch.int32)
    table[:, :width] = torch.randint(0, 2**30, (num_reqs, width))
    buffer = torch.full((MAX_NUM_TOKENS,), POISON, dtype=torch.int64, device=DEVICE)
    return KVGroup(gid, block_size, buffer, block_table=table.to(DEVICE)[:, :width])


@pytest.mark.parametrize("seed", range(40))
def test_slots_of_all_groups_are_those_of_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    num_groups, num_reqs = (int(x) for x in torch.randint(1, 9, (2,)))
    num_tokens, max_model_len = (int(x) for x in torch.randint(1, 1000, (2,)))
    padded = num_tokens + int(torch.randint(0, 300, ()))
    groups = [make_group(gid, num_reqs) for gid in range(num_groups)]
    req_indices = torch.randint(0, num_reqs, (num_tokens,), device=DEVICE)
    positions = torch.randint(-5, 1500, (num_tokens,), device=DEVICE)
    arguments = (groups, num_reqs, req_indices, positions, max_model_len, padded)
    with mock.patch("mtp.kernels.slots.has_kernels", return_value=False):
        write_slot_mappings(*arguments)
    expected = [group.slot_mapping.clone() for group in groups]
    for group in groups:
        group.slot_mapping.fill_(POISON)
    write_slot_mappings(*arguments)
    for group, slots in zip(groups, expected, strict=True):
        assert torch.equal(group.slot_mapping, slots)
        assert (slots[num_tokens:padded] == PADDING_SLOT_ID).all()
        assert (slots[padded:] == POISON).all()


@pytest.mark.parametrize(
    ("num_reqs", "size", "with_history", "windows", "chunk_ends"),
    [
        (1, 1, True, False, False),
        (3, 8, True, False, False),
        (70, 72, True, True, True),
        (128, 128, False, True, True),
        (255, 256, True, True, False),
        (5, 300, False, True, True),
    ],
)
def test_the_inputs_of_a_captured_pass_are_those_of_the_reference(
    num_reqs: int, size: int, with_history: bool, windows: bool, chunk_ends: bool
) -> None:
    torch.manual_seed(num_reqs)
    starts = torch.cat([torch.zeros(1), torch.randint(1, 5, (num_reqs,)).cumsum(0)]).int().to(DEVICE)
    num_rows = int(starts[-1])
    numbers = lambda count, dtype: torch.randint(0, 10**6, (count,), dtype=dtype, device=DEVICE)  # noqa: E731
    rows = StepRows(
        numbers(num_rows + 3, torch.int32),
        numbers(num_rows + 3, torch.int64),
        torch.randn(num_rows + 3, 8, device=DEVICE),
        numbers(num_reqs, torch.int64),
        starts,
    )
    slots = numbers(num_reqs, torch.int32) if with_history else None
    prompt = torch.randint(-1, 9, (num_reqs, 3), dtype=torch.int32, device=DEVICE) if chunk_ends else None
    inputs = PassInputs(rows, numbers(num_reqs, torch.int64), slots, prompt)
    window_starts = numbers(size + 1, torch.int32).cpu().numpy() if windows else None
    seq_lens = numbers(num_reqs, torch.int32)
    ours, reference = (StaticInputs.make(300, 1200, 4, 3, 300, 8, torch.float32, DEVICE) for _ in range(2))
    for static in (ours, reference):
        for x in tensors_of(static):
            x.fill_(POISON)
        static.history_slots.fill_(300)
        static.rows.query_start_loc[0] = 0
    ours.fill(inputs, num_rows, seq_lens, size, window_starts)
    fill_static_inputs_by_ops(reference, inputs, num_rows, seq_lens, size, windows)
    if windows:
        reference.window_starts[: size + 1] = torch.from_numpy(window_starts)
    reference.rows.hidden_states[:num_rows] = rows.hidden_states[:num_rows]
    for x, wanted in zip(tensors_of(ours), tensors_of(reference), strict=True):
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("num_reqs", [1, 70, 300])
def test_the_tokens_that_follow_are_those_of_the_reference(num_reqs: int) -> None:
    torch.manual_seed(num_reqs)
    last_sampled = torch.randint(0, 10**6, (400,), device=DEVICE)
    next_prefill = torch.randint(0, 10**6, (5, 400), dtype=torch.int32, device=DEVICE)
    num_sampled = torch.randint(0, 3, (num_reqs,), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(400, device=DEVICE)[:num_reqs]
    arguments = (last_sampled, next_prefill, num_sampled, rows, 3)
    for ours, wanted in zip(read_following(*arguments), read_following_by_ops(*arguments), strict=True):
        assert ours.is_contiguous()
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)


def tensors_of(static: StaticInputs) -> list[torch.Tensor]:
    rows = [x for x in (getattr(static.rows, field.name) for field in dataclasses.fields(static.rows)) if x is not None]
    by_request = [static.next_token_ids, static.history_slots, static.prompt_token_ids, static.seq_lens]
    return [*rows, *by_request, static.window_starts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128, 192, 4096])
def test_norms_are_the_hosts(vllm_config, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    norm = GemmaRMSNorm(size, 1e-5).to(DEVICE)
    norm.weight.data.normal_()
    wide = torch.randn(7, 3 * 2 * size + 5, device=DEVICE).to(dtype)
    inputs = [wide[:, 5 : 5 + size], wide[:, 5:].view(7, 6, size)[:, 2:4]]
    expected = [norm.forward_native(x.contiguous()) for x in inputs]  # vLLM's kernel wants aligned rows
    assert fuse_gemma_norms(torch.nn.Sequential(norm)) == 1
    for x, host in zip(inputs, expected, strict=True):
        ours = norm(x)
        assert ours.shape == host.shape
        assert ours.dtype == dtype
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + norm.weight.double())
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=rounding)
        torch.testing.assert_close(ours, host, rtol=rounding, atol=rounding)


def near(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert ours.dtype == wanted.dtype
    rounding = 8 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, wanted, rtol=rounding, atol=rounding)


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@DTYPES
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 192), (7, 4096), (0, 64)])
def test_an_addition_and_its_norm_are_those_of_the_reference(
    num_rows: int, size: int, some: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    rows = torch.randint(0, 9, (num_rows,), device=DEVICE) if some else None
    residual = make(9 if some else num_rows, size, dtype=dtype)
    arguments = make(num_rows, size, dtype=dtype), residual, make(size, dtype=dtype), 1e-5, rows
    for ours, wanted in zip(
        decoder.add_gemma_rms_norm(*arguments), decoder.add_gemma_rms_norm_by_ops(*arguments), strict=True
    ):
        near(ours, wanted)
        assert ours.data_ptr() != residual.data_ptr() or num_rows == 0


@DTYPES
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 192), (7, 4096), (0, 64)])
def test_embeddings_beside_hidden_states_are_those_of_the_reference(
    num_rows: int, size: int, with_ids: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    token_ids = torch.randint(0, 50, (num_rows,), dtype=torch.int32, device=DEVICE) if with_ids else None
    embeddings = make(50 if with_ids else num_rows, size, dtype=dtype)
    hidden = make(num_rows, size + 8, dtype=dtype)[:, 8:]
    arguments = token_ids, embeddings, hidden, make(size, dtype=dtype), make(size, dtype=dtype), 1e-5
    ours = decoder.embed_norm_concat(*arguments)
    assert ours.shape == (num_rows, 2 * size)
    near(ours, decoder.embed_norm_concat_by_ops(*arguments))


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(96, 8, 128, 128), (64, 8, 128, 64), (6, 2, 32, 16), (5, 1, 48, 24)],
)
def test_normed_and_rotated_heads_are_those_of_the_reference(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    qkv = make(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    query, key, _ = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(sizes, dim=-1))
    angles = torch.rand(300, rotary_dim // 2, device=DEVICE) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = make(head_dim, dtype=dtype), make(head_dim, dtype=dtype)
    for positions, cos_sin in (([0, 299, 17], table.to(dtype)), ([5, 0, 299], table)):
        for integer in (torch.int64, torch.int32):
            arguments = query, key, *weights, 1e-5, torch.tensor(positions, dtype=integer, device=DEVICE), cos_sin
            for ours, wanted in zip(decoder.norm_rope(*arguments), decoder.norm_rope_by_ops(*arguments), strict=True):
                assert ours.is_contiguous()
                near(ours, wanted)


@DTYPES
@pytest.mark.parametrize("rows", [None, [3, 0, 3], []])
@pytest.mark.parametrize(("num_rows", "heads", "head_dim"), [(5, 96, 128), (5, 6, 32), (5, 1, 7), (0, 3, 32)])
def test_gated_heads_are_those_of_the_reference(
    num_rows: int, heads: int, head_dim: int, rows: list[int] | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    x, gates = make(num_rows, heads * head_dim, dtype=dtype), make(num_rows, heads + 3, dtype=dtype)[:, 1 : heads + 1]
    chosen = None if rows is None else torch.tensor(rows[:num_rows], dtype=torch.int64, device=DEVICE)
    near(decoder.gate_heads(x, gates, chosen), decoder.gate_heads_by_ops(x, gates, chosen))


@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 1000, 4096, 32768, 128_815])
def test_an_argmax_is_the_first_of_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    logits = make(4, vocab_size + 5, dtype=dtype)[:, :vocab_size]
    logits[1, vocab_size // 2 :] = 50.0
    logits[2] = -float("inf")
    logits[3, ::2] = float("nan")
    logits[3, -1] = 60.0
    wanted = [int(logits[0].float().cpu().argmax()), vocab_size // 2, 0, vocab_size - 1]
    assert decoder.argmax(logits).tolist() == wanted


def test_an_argmax_of_nothing_but_nan_is_a_token() -> None:
    assert decoder.argmax(make(2, 4097) * float("nan")).tolist() == [0, 0]
