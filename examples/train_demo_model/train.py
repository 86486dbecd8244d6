"""Trains the language model of `flashmla demo`.

    python examples/train_demo_model/train.py --out trained/

The text is the King James Bible, which is in the public domain, as Debian's packages bible-kjv and
bible-kjv-text print it. Minutes on a GPU, hours on a CPU.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from flashmla.demo.model import Config, LanguageModel
from flashmla.demo.tokenizer import Tokenizer

VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")


def read_verses(path: Path | None) -> list[str]:
    """Lines such as `Ge1:1 In the beginning ...`, from a file or from the `bible` program."""
    if path is not None:
        return path.read_text(encoding="utf-8").splitlines()
    if shutil.which("bible") is None:
        raise SystemExit("there is no program `bible`: apt-get install bible-kjv, or give --text")
    command = ["bible", "-f", "Ge1:1-Re22:21"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return printed.stdout.splitlines()


def split_chapters(verses: list[str]) -> list[str]:
    """The chapters, each a paragraph of verses, one a line."""
    chapters: list[tuple[tuple[str, str], list[str]]] = []
    for line in verses:
        match = VERSE.match(line)
        if match is None:
            raise SystemExit(f"the text has a line that is no verse: {line!r}")
        book, chapter, _, verse = match.groups()
        if not chapters or chapters[-1][0] != (book, chapter):
            chapters.append(((book, chapter), []))
        chapters[-1][1].append(verse)
    return ["\n".join(verses) + "\n\n" for _, verses in chapters]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine to a tenth of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    progress = (step - 100) / max(1, steps - 100)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


@torch.inference_mode()
def validate(model: LanguageModel, tokens: torch.Tensor) -> float:
    model.eval()
    length = model.config.context_length
    rows = tokens[: (len(tokens) - 1) // length * length].view(-1, length)
    targets = tokens[1 : rows.numel() + 1].view(-1, length)
    total = 0.0
    for row, target in zip(rows.split(16), targets.split(16), strict=True):
        with torch.autocast(row.device.type, torch.bfloat16):
            logits = model(row)
        total += float(F.cross_entropy(logits.float().flatten(0, 1), target.flatten())) * len(row)
    model.train()
    return total / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what `bible -f Ge1:1-Re22:21` printed")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="sequences of the context length")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "training.log").open("w")

    def say(text: str) -> None:
        print(text, flush=True)
        log.write(text + "\n")
        log.flush()

    chapters = split_chapters(read_verses(options.text))
    config = Config()
    tokenizer = Tokenizer.train(chapters, config.vocab_size)
    tokenizer.save(options.out / "tokenizer.json")
    # Every 20th chapter is held out.
    parts = {"train": [], "held out": []}
    for index, chapter in enumerate(chapters):
        parts["held out" if index % 20 == 7 else "train"].append(chapter)
    data = {
        name: torch.tensor(tokenizer.encode("".join(texts)), device=device)
        for name, texts in parts.items()
    }
    model = LanguageModel(config, options.dropout).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    numbers = {name: value for name, value in vars(options).items() if name not in ("text", "out")}
    say("options: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))
    say(f"torch {torch.__version__} on {device}, {parameters} parameters")
    say(", ".join(f"{name}: {len(tokens)} tokens" for name, tokens in data.items()))

    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))
    train, length = data["train"], config.context_length
    offsets = torch.arange(length + 1, device=device)
    generator = torch.Generator(device).manual_seed(options.seed)
    best, best_step, begin = math.inf, 0, time.perf_counter()
    for step in range(options.steps):
        # A time limit shortens the schedule, so that the rate still ends low.
        spent = time.perf_counter() - begin
        progress = max(step / options.steps, spent / options.seconds)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step if step < 100 else int(progress * options.steps), options.steps, options.rate
            )
        starts = torch.randint(
            len(train) - length, (options.batch, 1), device=device, generator=generator
        )
        batch = train[starts + offsets]
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = step + 1 == options.steps or spent >= options.seconds
        if step % 100 == 99 or last:
            held_out = validate(model, data["held out"])
            note = ""
            if held_out < best:
                best, best_step, note = held_out, step + 1, "  saved"
                model.save(options.out / "weights.safetensors")
            say(
                f"step {step + 1:5d}  loss {loss.item():.4f}  held out {held_out:.4f}  "
                f"{time.perf_counter() - begin:6.1f} s{note}"
            )
        if last:
            break
    say(f"best: held out {best:.4f} nats a token at step {best_step}")


if __name__ == "__main__":
    main()
