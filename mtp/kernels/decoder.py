"""What stands between the GEMMs of a decoder layer, as one launch each, and an argmax as two.

A function has its PyTorch version below it by the name of `..._by_ops`: the reference, and what runs on a CPU. In
16-bit they round where the host's own operations do, except that a head stays in float32 from its norm through its
rotation. All tensors of a call are on one device and, if not said otherwise, of one dtype.
"""

import torch
import torch.nn.functional as F
from vllm.triton_utils import tl, triton

from mtp.kernels import has_kernels

# A head's norm is a warp's work, and there are thousands of heads in a batch; a row's takes several.
ELEMENTS_PER_WARP = 512
MAX_WARPS = 8
HEADS_PER_PROGRAM = 8
GATED_BLOCK = 1024
LOGITS_BLOCK = 4096


def _warps(block: int) -> int:
    return min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS)


# Norms. Gemma's: `x * rsqrt(mean(x^2) + eps) * (1 + weight)` in float32. The gain is added up anew each time, since
# weights may be updated in place while serving.


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of rows that need not lie side by side: queries and keys are views into a wider tensor.

    Args:
        x: `[..., size]`.
        weight: `[size]`.
    """
    if not (has_kernels(x) and x.dim() in (2, 3) and x.stride(-1) == 1):
        return gemma_rms_norm_by_ops(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    size = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(size)
        _gemma_rms_norm[x.shape[0], heads](
            x, weight, out, x.stride(0), head_stride, size, eps, block, num_warps=_warps(block)
        )
    return out


def gemma_rms_norm_by_ops(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    gain = weight.float() + 1.0
    # A compiler makes one kernel of this and what stands around it, unless it is told which.
    if x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), gain, eps)
        return out
    return F.rms_norm(x.float(), (x.shape[-1],), gain, eps).to(x.dtype)


@triton.jit
def _normed(x, weight, size, eps):
    x, weight = x.to(tl.float32), weight.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / size + eps) * (weight + 1.0)


@triton.jit
def _gemma_rms_norm(x_ptr, weight_ptr, out_ptr, row_stride, head_stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * row_stride + head * head_stride + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    out = out_ptr + (row * tl.num_programs(1) + head) * size + columns
    tl.store(out, _normed(x, weight, size, eps).to(out_ptr.dtype.element_ty), mask=inside)


def add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream after a sublayer, and its norm, which the next one takes.

    Args:
        x: `[num_rows, size]`.
        residual: the same; where there are `rows`, of at least as many as these name.
        rows: `[num_rows]` integers, the rows of `residual` that those of `x` belong to; None: the same.

    Returns:
        both of the shape of `x`, and memory of their own.
    """
    if not (has_kernels(x) and x.is_contiguous() and residual.is_contiguous()):
        return add_gemma_rms_norm_by_ops(x, residual, weight, eps, rows)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(size)
        _add_gemma_rms_norm[(x.shape[0],)](
            x,
            residual,
            weight,
            x if rows is None else rows,
            total,
            normed,
            size,
            eps,
            rows is not None,
            block,
            num_warps=_warps(block),
        )
    return total, normed


def add_gemma_rms_norm_by_ops(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + (residual if rows is None else residual[rows])
    return total, gemma_rms_norm_by_ops(total, weight, eps)


@triton.jit
def _add_gemma_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    rows_ptr,
    total_ptr,
    normed_ptr,
    size,
    eps,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row).to(tl.int64) if HAS_ROWS else row
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = row * size + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + source * size + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    total = (x + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=inside)
    tl.store(normed_ptr + at, _normed(total, weight, size, eps).to(normed_ptr.dtype.element_ty), mask=inside)


def embed_norm_concat(
    token_ids: torch.Tensor | None,
    embeddings: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What an MTP module projects: the norm of a token's embedding beside that of the hidden state before it.

    Both halves of DeepSeek-V3's MTP (arXiv 2412.19437, 2.2).

    Args:
        token_ids: `[num_rows]`, rows of `embeddings`; None where those are the embeddings of the rows themselves.
        embeddings: `[num_embeddings, size]`.
        hidden: `[num_rows, size]`.

    Returns:
        `[num_rows, 2 * size]`.
    """
    if not (has_kernels(hidden) and hidden.stride(-1) == embeddings.stride(-1) == 1):
        return embed_norm_concat_by_ops(token_ids, embeddings, hidden, embedding_weight, hidden_weight, eps)
    num_rows, size = hidden.shape
    out = torch.empty(num_rows, 2 * size, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _embed_norm_concat[num_rows, 2](
            hidden if token_ids is None else token_ids,
            embeddings,
            hidden,
            embedding_weight,
            hidden_weight,
            out,
            embeddings.stride(0),
            hidden.stride(0),
            size,
            eps,
            token_ids is not None,
            block,
            num_warps=_warps(block),
        )
    return out


def embed_norm_concat_by_ops(
    token_ids: torch.Tensor | None,
    embeddings: torch.Tensor,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    embedded = embeddings if token_ids is None else F.embedding(token_ids, embeddings)
    halves = gemma_rms_norm_by_ops(embedded, embedding_weight, eps), gemma_rms_norm_by_ops(hidden, hidden_weight, eps)
    return torch.cat(halves, dim=-1)


@triton.jit
def _embed_norm_concat(
    token_ids_ptr,
    embeddings_ptr,
    hidden_ptr,
    embedding_weight_ptr,
    hidden_weight_ptr,
    out_ptr,
    embedding_stride,
    hidden_stride,
    size,
    eps,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    if tl.program_id(1) == 0:
        source = tl.load(token_ids_ptr + row).to(tl.int64) if HAS_IDS else row
        x = tl.load(embeddings_ptr + source * embedding_stride + columns, mask=inside, other=0.0)
        weight = tl.load(embedding_weight_ptr + columns, mask=inside, other=0.0)
    else:
        x = tl.load(hidden_ptr + row * hidden_stride + columns, mask=inside, other=0.0)
        weight = tl.load(hidden_weight_ptr + columns, mask=inside, other=0.0)
    out = out_ptr + (2 * row + tl.program_id(1)) * size + columns
    tl.store(out, _normed(x, weight, size, eps).to(out_ptr.dtype.element_ty), mask=inside)


# Attention.


def norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, each head normed and rotated by its row's position (in halves, as GPT-NeoX does it).

    Args:
        query, key: `[num_rows, heads, head_dim]`, each a view into a wider tensor if need be.
        positions: `[num_rows]` integers.
        cos_sin: `[max_position, rotary_dim]` of any dtype: the cosines, then the sines.

    Returns:
        both, contiguous.
    """
    if not (has_kernels(query) and query.stride(-1) == key.stride(-1) == 1):
        return norm_rope_by_ops(query, key, query_weight, key_weight, eps, positions, cos_sin)
    out_query, out_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    num_rows, query_heads, head_dim = query.shape
    if num_rows:
        blocks = [triton.cdiv(heads, HEADS_PER_PROGRAM) for heads in (query_heads, key.shape[1])]
        _norm_rope[num_rows, sum(blocks)](
            query,
            key,
            query_weight,
            key_weight,
            positions,
            cos_sin,
            out_query,
            out_key,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos_sin.stride(0),
            query_heads,
            key.shape[1],
            blocks[0],
            eps,
            head_dim,
            cos_sin.shape[1] // 2,
            HEADS_PER_PROGRAM,
            triton.next_power_of_2(head_dim),
            num_warps=HEADS_PER_PROGRAM,
        )
    return out_query, out_key


def norm_rope_by_ops(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = gemma_rms_norm_by_ops(x.float(), weight, eps)
        first, second, rest = torch.split(normed, [half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)

    return rotated(query, query_weight), rotated(key, key_weight)


@triton.jit
def _norm_rope(
    query_ptr,
    key_ptr,
    query_weight_ptr,
    key_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_query_ptr,
    out_key_ptr,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    cos_sin_stride,
    query_heads,
    key_heads,
    query_blocks,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has some heads of one row: queries first, then keys."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # A column turns with its partner in the other half; those past the rotated ones stay as they are.
    partners = tl.where(columns < HALF, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, columns))
    turns = columns < 2 * HALF
    angle = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * cos_sin_stride + columns % HALF
    cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(columns < HALF, -sin, sin)
    block = tl.program_id(1)
    if block < query_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)
        there = heads < query_heads
        x_ptr = query_ptr + row * query_row_stride + heads[:, None] * query_head_stride
        out_ptr = out_query_ptr + (row * query_heads + heads[:, None]) * HEAD_DIM
        weight_ptr = query_weight_ptr
    else:
        heads = (block - query_blocks) * HEADS + tl.arange(0, HEADS)
        there = heads < key_heads
        x_ptr = key_ptr + row * key_row_stride + heads[:, None] * key_head_stride
        out_ptr = out_key_ptr + (row * key_heads + heads[:, None]) * HEAD_DIM
        weight_ptr = key_weight_ptr
    inside = (columns < HEAD_DIM)[None, :] & there[:, None]
    x = tl.load(x_ptr + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32) + 1.0
    partner_gain = tl.load(weight_ptr + partners, mask=columns < HEAD_DIM, other=0.0).to(tl.float32) + 1.0
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    out = x * gain[None, :] * cos[None, :] + partner * partner_gain[None, :] * sin[None, :]
    tl.store(out_ptr + columns[None, :], (out * scale).to(out_query_ptr.dtype.element_ty), mask=inside)


def gate_heads(x: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Scales every head of attention's output by the sigmoid of its gate (arXiv 2505.06708).

    Args:
        x: `[num_rows, heads * head_dim]`.
        gates: `[num_rows, heads]`.
        rows: `[num_wanted]` integers, the rows that are wanted; None: all.
    """
    if not (has_kernels(x) and x.is_contiguous() and gates.stride(-1) == 1):
        return gate_heads_by_ops(x, gates, rows)
    size, num_wanted = x.shape[1], x.shape[0] if rows is None else rows.shape[0]
    out = torch.empty(num_wanted, size, dtype=x.dtype, device=x.device)
    if out.numel():
        _gate_heads[num_wanted, triton.cdiv(size, GATED_BLOCK)](
            x,
            gates,
            x if rows is None else rows,
            out,
            gates.stride(0),
            size,
            size // gates.shape[1],
            rows is not None,
            GATED_BLOCK,
        )
    return out


def gate_heads_by_ops(x: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    if rows is not None:
        x, gates = x[rows], gates[rows]
    heads = gates.shape[1]
    return (x.view(-1, heads, x.shape[1] // heads) * gates.unsqueeze(-1).sigmoid()).view(x.shape)


@triton.jit
def _gate_heads(
    x_ptr, gates_ptr, rows_ptr, out_ptr, gate_stride, size, head_dim, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row).to(tl.int64) if HAS_ROWS else row
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out_ptr.dtype.element_ty
    gates = tl.load(gates_ptr + source * gate_stride + columns // head_dim, mask=inside, other=0.0)
    scale = tl.sigmoid(gates.to(tl.float32)).to(dtype).to(tl.float32)
    x = tl.load(x_ptr + source * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (x * scale).to(dtype), mask=inside)


# Heads.


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest logits of each row.

    A row of a vocabulary is split among programs: PyTorch gives each to one.

    Args:
        logits: `[num_rows, vocab_size]`. Where there is NaN, what comes is some token: on CUDA of the largest number.

    Returns:
        `[num_rows]` int64.
    """
    if not (has_kernels(logits) and logits.dim() == 2 and logits.stride(-1) == 1):
        return logits.argmax(dim=-1)
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        blocks = triton.cdiv(vocab_size, LOGITS_BLOCK)
        values = torch.empty(num_rows, blocks, dtype=torch.float32, device=logits.device)
        columns = torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device)
        _block_argmax[num_rows, blocks](
            logits, values, columns, logits.stride(0), vocab_size, LOGITS_BLOCK, num_warps=_warps(LOGITS_BLOCK)
        )
        _argmax_of_blocks[(num_rows,)](values, columns, out, blocks, triton.next_power_of_2(blocks), num_warps=1)
    return out


@triton.jit
def _block_argmax(logits_ptr, values_ptr, columns_ptr, row_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab_size, other=-float("inf"))
    logits = tl.where(logits == logits, logits, -float("inf"))  # of NaN no column must come that there isn't
    value, index = tl.max(logits.to(tl.float32), axis=0, return_indices=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, value)
    tl.store(columns_ptr + at, tl.program_id(1) * BLOCK + index)


@triton.jit
def _argmax_of_blocks(values_ptr, columns_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))
    _, index = tl.max(values, axis=0, return_indices=True)
    tl.store(out_ptr + row, tl.load(columns_ptr + row * num_blocks + index).to(tl.int64))
