r"""Trains a tiny model of Step-3.5's or of MiMo-V2's style and writes a checkpoint that vLLM loads.

    python tools/train_tiny.py --out assets/tiny-step3p5 --minutes 8
    python tools/train_tiny.py --architecture mimo-v2 --tokenizer assets/tiny-step3p5 --out mimo-v2 --minutes 5
    python tools/train_tiny.py --architecture mimo-v2 --tokenizer assets/tiny-step3p5 --out assets/tiny-mimo-v2 \
        --modules-of mimo-v2 --dropout 0 --minutes 5

Needs PyTorch, tokenizers and tqdm, no vLLM. The text is the Python standard library's (bench/corpus.py), the target
learns to predict it, and each module learns the target's own distribution, since what a draft must match is the
target and not the text. An interrupted run goes on where it stopped.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.corpus import read_sources
from bench.shapes import TinyConfig
from tools.tiny_mimo_v2 import TinyMiMoV2, TinyMiMoV2Config
from tools.tiny_model import TinyStep3p5

END_OF_TEXT = "<|endoftext|>"
MODULE_LOSS_WEIGHT = 0.4

TinyModelConfig = TinyConfig | TinyMiMoV2Config
TinyModel = TinyStep3p5 | TinyMiMoV2


@dataclass(frozen=True)
class Architecture:
    """What can be trained, and what the model card says of it.

    Attributes:
        name: whose architecture it is.
        modules: what is said of its modules.
        options: what follows `tools/train_tiny.py` to train it.
    """

    config: type[TinyModelConfig]
    model: Callable[[Any], TinyModel]
    title: str
    name: str
    modules: str
    options: str = ""


ARCHITECTURES = {
    "step3p5": Architecture(TinyConfig, TinyStep3p5, "tiny-step3p5", "Step-3.5", "chained"),
    "mimo-v2": Architecture(
        TinyMiMoV2Config, TinyMiMoV2, "tiny-mimo-v2", "MiMo-V2", "sliding", " --architecture mimo-v2"
    ),
}


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def train_tokenizer(config: TinyModelConfig, folder: Path):
    """A byte-level BPE of `vocab_size` entries, written as `tokenizer.json`; it is kept if it is there already."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in read_sources(held_out=False)), trainer)
    tokenizer.save(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return tokenizer


def encode_sources(tokenizer, *, held_out: bool) -> Tensor:
    """All files of one part, each followed by the end-of-text token, as one int16 stream."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([text for _, text in read_sources(held_out=held_out)])
    return torch.tensor([token for e in encodings for token in (*e.ids, end)], dtype=torch.int16)


def sample_batch(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(stream) - length, (batch,), generator=generator).to(stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)].long()


@torch.no_grad()
def write_text(model: TinyModel, stream: Tensor, rounds: int, generator: torch.Generator) -> Tensor:
    """A stream of what the target writes after pieces of this one: half of it greedily, half sampled.

    What modules draft for is text of the target's own, which is another than the text that it has learnt from.
    """
    batch, given, length = 256, 128, 512
    pieces = []
    for _ in range(rounds):
        ids = sample_batch(stream, batch, length, generator)
        for position in range(given, length):
            with torch.autocast(ids.device.type, torch.bfloat16):
                logits = model(ids)[0][:, position - 1].float()
            drawn = (logits / 0.7).softmax(-1).multinomial(1).squeeze(1)
            ids[:, position] = torch.where(torch.arange(batch, device=ids.device) % 2 == 0, logits.argmax(-1), drawn)
        pieces.append(ids.flatten().to(stream.dtype))
    return torch.cat(pieces)


def is_of_module(config: TinyModelConfig, name: str) -> bool:
    """Whether a parameter of that name belongs to a module."""
    if isinstance(config, TinyMiMoV2Config):
        return ".mtp." in name
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= len(config.target_layers)


def losses(model: TinyModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's cross entropy with the text, and `[modules]` cross entropies with the target's distribution."""
    logits, module_logits = model(ids)
    target = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    teacher = logits.detach().float().softmax(dim=-1)
    modules = []
    for i, student in enumerate(module_logits):
        log_probs = student[:, : -(1 + i)].float().log_softmax(dim=-1)
        modules.append(-(teacher[:, 1 + i :] * log_probs).sum(-1).mean())
    return target, torch.stack(modules)


@torch.no_grad()
def evaluate(model: TinyModel, stream: Tensor, length: int, batch: int = 16) -> dict[str, Any]:
    """Loss, accuracy and, per module, how often its greedy token is the target's, on held-out text."""
    rows = stream[: len(stream) // length * length].view(-1, length).long()
    loss, right = [], []
    agreement: list[list[Tensor]] = [[] for _ in model.config.module_layers]
    for ids in rows.split(batch):
        logits, module_logits = model(ids)
        loss.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"))
        greedy = logits.argmax(-1)
        right.append((greedy[:, :-1] == ids[:, 1:]).flatten())
        for i, student in enumerate(module_logits):
            agreement[i].append((student[:, : -(1 + i)].argmax(-1) == greedy[:, 1 + i :]).flatten())
    return {
        "held_out_tokens": rows.numel(),
        "target_loss_nats": round(torch.cat(loss).mean().item(), 4),
        "target_accuracy": round(torch.cat(right).float().mean().item(), 4),
        "module_agreement": [round(torch.cat(a).float().mean().item(), 4) for a in agreement],
    }


def learning_rate(fraction: float, peak: float) -> float:
    """Warm-up over the first 2 % of the run, then a straight line to zero."""
    return peak * min(fraction / 0.02, 1.0) * (1.0 - fraction)


def write_checkpoint(model: TinyModel, folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def write_model_card(folder: Path, architecture: Architecture, report: dict[str, Any]) -> None:
    agreement = report["module_agreement"]
    trained = f"`tools/train_tiny.py{architecture.options}` on {report['device']}: {_duration(report)}"
    if base := report.get("base"):
        trained = (
            f"`tools/train_tiny.py{architecture.options}` on {base['device']}: {_duration(base)}; then its modules "
            f"alone, over text of the target's own too (`--modules-of`): {_duration(report)}"
        )
    size = f"{report['parameters'] / 1e6:.1f} M"
    rows = "\n".join(f"| {i} | {value:.3f} |" for i, value in enumerate(agreement))
    (folder / "README.md").write_text(
        f"""# {architecture.title}

A {size} parameter language model of {architecture.name}'s architecture with {len(agreement)} {architecture.modules}
multi-token-prediction modules, for demonstrations, benchmarks and tests. It has learnt nothing but the sources of
Python's standard library and is of no other use. Weights are bfloat16.

Trained by {trained}.
The text is Python {report["python"]}'s standard library, one file in 20 held out (`bench/corpus.py`).

On {report["held_out_tokens"]} held-out tokens, in bfloat16 as shipped: loss {report["target_loss_nats"]} nats a token,
accuracy {report["target_accuracy"]}. How often a module's greedy token is the target's:

| module | agreement |
|---|---|
{rows}

`training.json` has the same figures for programs.
"""
    )
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def _duration(report: dict[str, Any]) -> str:
    return f"{report['steps']} steps, {report['minutes']} minutes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="step3p5")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is taken; default: one is trained")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time; the learning rate ends at zero")
    parser.add_argument("--steps", type=int, default=100_000, help="ends earlier, for trials")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--modules-of", type=Path, help="goes on with the modules of that checkpoint alone, over its target's own text"
    )
    parser.add_argument("--text-rounds", type=int, default=24, help="of 131072 tokens that the target then writes")
    parser.add_argument("--dropout", type=float, help="default: the architecture's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    from safetensors.torch import load_file
    from tqdm import tqdm

    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    architecture = ARCHITECTURES[args.architecture]
    dropout = architecture.config.dropout if args.dropout is None else args.dropout
    config = architecture.config(dropout=dropout)
    if args.tokenizer is not None:
        copy_tokenizer(args.tokenizer, args.out)
    tokenizer = train_tokenizer(config, args.out)
    train, held_out = (encode_sources(tokenizer, held_out=part).to(args.device) for part in (False, True))
    model = architecture.model(config).to(args.device)
    generator = torch.Generator().manual_seed(args.seed)
    if args.modules_of is not None:
        model.load_state_dict(load_file(args.modules_of / "model.safetensors", device=args.device))
        train = torch.cat([train, write_text(model.eval(), train, args.text_rounds, generator)])
        model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_of_module(config, name))
    learning = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.dim() > 1]
    gains = [p for p in learning if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=args.device == "cuda",
    )
    step, spent, state_file = 0, 0.0, args.out / "training_state.pt"
    if state_file.exists():
        state = torch.load(state_file, map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"].cpu())
        step, spent = state["step"], state["spent"]
        print(f"going on at step {step}, {spent / 60:.1f} minutes in", file=sys.stderr)

    def save_state() -> None:
        partial = state_file.with_suffix(".tmp")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": spent}
        torch.save({**state, "generator": generator.get_state()}, partial)
        partial.replace(state_file)

    def train_step(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(args.device, torch.bfloat16):
            target, modules = losses(model, ids)
        (target + MODULE_LOSS_WEIGHT * modules.sum()).backward()
        return target.detach(), modules.detach()

    compiled_step = torch.compile(train_step) if args.device == "cuda" else train_step
    total = args.minutes * 60
    bar = tqdm(total=round(total), initial=round(spent), unit="s", mininterval=5, file=sys.stderr)
    last_save = last_log = time.monotonic()
    while spent < total and step < args.steps:
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spent / total, args.lr)
        target, modules = compiled_step(sample_batch(train, args.batch, args.length, generator))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 and time.monotonic() - last_log > 5:
            last_log = time.monotonic()
            bar.set_postfix(step=step, target=f"{target:.3f}", modules=" ".join(f"{x:.3f}" for x in modules.tolist()))
        elif args.device == "cuda" and step % 20 == 0:
            torch.cuda.synchronize()  # so that the clock below sees the work
        step += 1
        spent += time.monotonic() - started
        bar.update(round(spent) - bar.n)
        if time.monotonic() - last_save > 60:
            save_state()
            last_save = time.monotonic()
            model.eval()
            bar.write(f"step {step}: {json.dumps(evaluate(model, held_out[: 32 * args.length], args.length))}")
            model.train()
    bar.close()

    model.eval().to(torch.bfloat16).float()  # judged as shipped
    report = {
        **evaluate(model, held_out, args.length),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "minutes": round(spent / 60, 2),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "a CPU",
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "train_tokens": len(train),
        "batch_tokens": args.batch * args.length,
        "architecture": asdict(config),
    }
    if args.modules_of is not None:
        report["base"] = json.loads((args.modules_of / "training.json").read_text())
    write_checkpoint(model, args.out)
    write_model_card(args.out, architecture, report)
    state_file.unlink(missing_ok=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
