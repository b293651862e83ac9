"""Train `exaone4-tiny` on the King James Bible, on a CPU, in about an hour.

    torchrun --nproc-per-node 2 training/train_exaone4_tiny.py --out run --minutes 66 --precision bf16 --compile

One single-threaded process a core, which average their gradients, lose less on a shared machine than one process with
many threads; plain `python` runs one process.
Weights and optimizer are fp32; `--precision bf16` runs the matrix products in bfloat16. The learning rate follows
steps or minutes, whichever is further along, so that the cosine always ends within the budget. A run that was stopped
continues from `run/last.pt` with the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kjv_text
import torch
import torch.distributed as dist
from exaone4_tiny import TRAINED_LENGTH, fresh_model, load_tokenizer, text_loss, train_tokenizer
from tokenizers import Tokenizer
from torch import nn
from transformers import Exaone4ForCausalLM


def batches(
    chapters: list[kjv_text.Chapter], tokenizer: Tokenizer, *, size: int, seed: int, skip: int
) -> Iterator[torch.Tensor]:
    """Packed sequences for ever, regrouped and reshuffled every epoch; the first `skip` batches are left out.

    Shape: [size, TRAINED_LENGTH + 1]
    """
    epoch, length = 0, TRAINED_LENGTH + 1
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        encoded = tokenizer.encode_batch(kjv_text.documents(chapters, rng))
        stream = torch.tensor([token for one in encoded for token in one.ids])
        offset = rng.randrange(length)
        rows = stream[offset : offset + (len(stream) - offset) // length * length].view(-1, length)
        rows = rows[torch.tensor(rng.sample(range(len(rows)), len(rows)))]
        for start in range(0, len(rows) - size + 1, size):
            if skip > 0:
                skip -= 1
            else:
                yield rows[start : start + size]
        epoch += 1


def optimizer_for(model: Exaone4ForCausalLM, *, lr: float, decay: float) -> torch.optim.AdamW:
    """AdamW; matrices decay, norm weights do not."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() == 2], "weight_decay": decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)


def rate(step: int, progress: float, warmup: int) -> float:
    """Share of the peak: a cosine down to 1 %, under a linear warmup that is always in steps (compiling eats minutes)."""
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def loss_function(model: Exaone4ForCausalLM, *, compile_it: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Mean next-token loss of [B, S + 1] tokens."""

    def loss(rows: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, rows[:, 1:].flatten())

    return torch.compile(loss, dynamic=False) if compile_it else loss


def average_gradients(model: Exaone4ForCausalLM, loss: torch.Tensor) -> float:
    """Average gradients and loss over the processes, in place; returns the loss."""
    if dist.is_initialized():
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        flat = torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat[1:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        return float(flat[0])
    return loss.item()


def shared_clock(seconds: float) -> float:
    """The first process's seconds, so that all end at the same step."""
    if dist.is_initialized():
        clock = torch.tensor(seconds, dtype=torch.float64)
        dist.broadcast(clock, 0)
        return float(clock)
    return seconds


def write(path: Path, state: dict[str, object]) -> None:
    """Save so that an interruption never leaves half a file."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: checkpoints, tokenizer, log")
    parser.add_argument("--text", type=Path, help="`bible -f gen1:1-rev22:21` in a file (default: run the command)")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="budget; counted over restarts")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 512 tokens a step, over all processes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=150, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not divide among {world} processes")
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    chapters, validation, _ = kjv_text.split(kjv_text.chapters(kjv_text.read_raw(args.text)))
    tokenizer_file = args.out / "tokenizer.json"
    if rank == 0 and not tokenizer_file.exists():
        train_tokenizer(kjv_text.joined(chapters)).save(str(tokenizer_file))
    if rank == 0:
        (args.out / "run.json").write_text(json.dumps(vars(args) | {"processes": world}, default=str))
    if world > 1:
        dist.barrier()
    tokenizer = load_tokenizer(tokenizer_file)

    model = fresh_model().train()
    optimizer = optimizer_for(model, lr=args.lr, decay=args.decay)
    step, seconds, best = 0, 0.0, math.inf
    if (args.out / "last.pt").exists():
        state = torch.load(args.out / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds, best = state["step"], state["seconds"], state["best"]
    loss_of = loss_function(model, compile_it=args.compile)

    def autocast() -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()

    stream = batches(chapters, tokenizer, size=args.batch, seed=args.seed, skip=step)
    running, saved_at, finished = None, seconds, False
    while not finished:
        began = time.monotonic()
        progress = max(step / args.steps, seconds / 60 / args.minutes)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, progress, args.warmup)
        with autocast():
            loss = loss_of(next(stream)[rank::world])
        loss.backward()
        value = average_gradients(model, loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        running = value if running is None else 0.98 * running + 0.02 * value
        seconds = shared_clock(seconds + time.monotonic() - began)
        finished = step >= args.steps or seconds / 60 >= args.minutes

        if rank == 0 and (step % 50 == 0 or finished):
            entry = {"step": step, "minutes": round(seconds / 60, 2), "tokens": step * args.batch * TRAINED_LENGTH}
            entry |= {"lr": round(optimizer.param_groups[0]["lr"], 6), "train": round(running, 4)}
            if step % 200 == 0 or finished:
                score = text_loss(model, tokenizer, kjv_text.joined(validation))["nats_per_token"]
                entry["validation"] = round(score, 4)
                if score < best:
                    best = score
                    write(args.out / "best.pt", {"model": model.state_dict(), **entry})
            with (args.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            print(json.dumps(entry), flush=True)
        if rank == 0 and (finished or seconds - saved_at >= 300):
            saved_at = seconds
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write(args.out / "last.pt", state | {"step": step, "seconds": seconds, "best": best})


if __name__ == "__main__":
    main()
