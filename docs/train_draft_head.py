"""From hidden states to a draft head: extracts records from the tiny model and trains one layer on them.

    python docs/train_draft_head.py --records records

The head sees, at position p, the hidden states of three layers and the token at p + 1, and is to say the token at
p + 2, as the first step of an EAGLE-style draft does. Its own parts are a projection and one attention layer; the
embeddings and the output head are the target's.
"""

import argparse
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from bench.corpus import read_sources
from bench.environment import describe_environment, write_record
from proposers.hidden_states import Record, RecordDataset
from proposers.hidden_states.final_norm import FinalNorm

MODEL = Path(__file__).resolve().parent.parent / "assets" / "tiny-step3p5"
LAYER_IDS = [1, 3, 6]  # 6 is what leaves the last of six layers


def extract(root: Path, count: int, num_tokens: int) -> None:
    """Writes records of prompts cut out of the standard library's sources."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by itself vLLM takes nearly all of the machine
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=num_tokens + 1,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"storage_root": str(root), "sharded": True},
        },
    )
    tokenizer = llm.get_tokenizer()
    texts = (
        tokenizer.encode(text[: 8 * num_tokens], add_special_tokens=False) for _, text in read_sources(held_out=False)
    )
    long_enough = (tokens[:num_tokens] for tokens in texts if len(tokens) >= num_tokens)
    prompts = [{"prompt_token_ids": tokens} for _, tokens in zip(range(count), long_enough, strict=False)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    failed = [output.kv_transfer_params["error"] for output in outputs if "error" in output.kv_transfer_params]
    if failed:
        raise SystemExit(f"{len(failed)} records were not written, the first because of {failed[0]}")


class DraftHead(nn.Module):
    """One attention layer between the target's embeddings and its output head."""

    def __init__(self, model: Path, num_layers: int) -> None:
        super().__init__()
        weights = load_file(model / "model.safetensors")
        self.embedding = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"].float())
        self.head = weights["lm_head.weight"].float()
        self.norm = FinalNorm(model)
        size = self.embedding.embedding_dim
        self.project = nn.Linear((num_layers + 1) * size, size, bias=False)
        self.layer = nn.TransformerEncoderLayer(size, 6, 2 * size, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        """Logits `[B, T, vocab]` from hidden states `[B, T, L, H]` and the tokens after them `[B, T]`."""
        parts = functional.rms_norm(
            torch.cat([hidden, self.embedding(following)[:, :, None]], dim=2), hidden.shape[-1:]
        )
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        return self.norm(self.layer(self.project(parts.flatten(2)), src_mask=mask, is_causal=True)) @ self.head.T


def stack(records: list[Record]) -> tuple[Tensor, Tensor]:
    """Hidden states `[B, T, L, H]` and token ids `[B, T]`."""
    return torch.stack([r.hidden_states.float() for r in records]), torch.stack([r.token_ids for r in records])


def predictions(head: DraftHead, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the tokens that are right, for all positions that have two tokens after them."""
    return head(hidden[:, :-2], tokens[:, 1:-1]), tokens[:, 2:]


@torch.no_grad()
def accuracy(head: DraftHead, records: list[Record]) -> float:
    logits, right = predictions(head, *stack(records))
    return float((logits.argmax(-1) == right).float().mean())


def train(head: DraftHead, records: list[Record], held_out: list[Record], steps: int) -> list[tuple[int, float]]:
    """Trains, and returns the accuracy on the held-out records as it goes."""
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    curve = [(0, accuracy(head, held_out))]
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        batch = [records[i] for i in torch.randint(len(records), (16,), generator=generator).tolist()]
        logits, right = predictions(head, *stack(batch))
        loss = functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 6) == 0:
            curve.append((step, accuracy(head, held_out)))
            print(f"step {step}: accuracy {curve[-1][1]:.3f}, loss {float(loss):.3f}", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=Path, required=True, help="folder for the records; what it has is reused")
    parser.add_argument("--count", type=int, default=320, help="records, a tenth of which are held out")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="file for what came of it")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.records.exists() or not any(args.records.iterdir()):
        extract(args.records, args.count, args.tokens)
    dataset = RecordDataset(args.records)
    records = [dataset[i] for i in range(len(dataset))]
    info = records[0].info
    print(f"{len(records)} records of {info.rows} tokens, layers {list(info.layer_ids)} of {info.model}")
    held_out = records[::10]
    head = DraftHead(MODEL, len(info.layer_ids))
    curve = train(head, [r for i, r in enumerate(records) if i % 10], held_out, args.steps)
    print(f"accuracy on {len(held_out)} held-out records: {curve[0][1]:.3f} before, {curve[-1][1]:.3f} after")
    counts = {"records": len(records), "held_out": len(held_out), "tokens": info.rows, "steps": args.steps}
    accuracies = {"accuracy_before": round(curve[0][1], 4), "accuracy_after": round(curve[-1][1], 4)}
    command = f"python docs/train_draft_head.py --count {args.count} --tokens {args.tokens} --steps {args.steps}"
    write_record({"environment": describe_environment() | {"command": command}, **counts, **accuracies}, args.json)


if __name__ == "__main__":
    main()
