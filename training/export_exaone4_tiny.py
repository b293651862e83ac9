"""Turn a finished run into the folder that ships: bfloat16 weights, tokenizer, held-out text, prompts, figures.

python training/export_exaone4_tiny.py --run run --out ane_layers/bundled/exaone4-tiny
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import kjv_text
import tokenizers
import torch
import transformers
from exaone4_tiny import BOS_ID, END_OF_TURN_ID, PAD_ID, TRAINED_LENGTH, config, load_tokenizer, text_loss
from transformers import Exaone4ForCausalLM, GenerationConfig, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '[|' + message['role'] + '|]\\n' + message['content'] + '[|endofturn|]\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]\\n' }}{% endif %}"
)

# The first words of held-out verses are taken from the text; these are free.
FREE_PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "The LORD is my",
    "Blessed are they that",
    "And Moses said unto the people,",
    "Then Jesus answered and said unto them,",
    "The word of the LORD came unto me, saying,",
    "A wise man",
    "My son, hear",
    "And the king said unto his servants,",
    "Praise ye the LORD",
    "Woe unto them that",
    "Let us go up to",
    "Now there was a man in",
    "These are the sons of",
)


def prompts(heldout: list[kjv_text.Chapter]) -> list[str]:
    """Thirty prompts: three verse beginnings of five to nine words from each held-out chapter, and the free ones."""
    found = []
    for chapter in heldout:
        for number in range(3):
            verse = chapter.verses[number * (len(chapter.verses) // 3) + 1]
            found.append(" ".join(verse.split(" ")[: 5 + 2 * number]))
    return [*found, *FREE_PROMPTS]


def save_tokenizer(run: Path, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, readable by transformers 4 and 5 and by `tokenizers` alone."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=load_tokenizer(run / "tokenizer.json"),
        bos_token="[BOS]",
        eos_token="[|endofturn|]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        model_max_length=config().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def figures(run: Path, best: dict[str, Any], model: Exaone4ForCausalLM, texts: dict[str, str]) -> dict[str, Any]:
    """What `training.json` records; `best` is the checkpoint that ships."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    args = json.loads((run / "run.json").read_text())
    tokenizer = load_tokenizer(run / "tokenizer.json")
    corpus = len(tokenizer.encode(texts["train"]).ids)
    settings = ("seed", "batch", "lr", "decay", "warmup", "precision", "processes")
    return {
        "model": "exaone4-tiny",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "heldout": text_loss(model, tokenizer, texts["heldout"]),
        "heldout_nats_per_token_by_window": {
            length: round(text_loss(model, tokenizer, texts["heldout"], length=length)["nats_per_token"], 4)
            for length in (TRAINED_LENGTH, 2 * TRAINED_LENGTH, 4 * TRAINED_LENGTH)
        },
        "validation": text_loss(model, tokenizer, texts["validation"]),
        "train_running_nats_per_token": best["train"],
        "heldout_chapters": list(kjv_text.HELDOUT),
        "validation_chapters": list(kjv_text.VALIDATION),
        "protocol": "one [BOS], then windows of 512 tokens advancing by 256, the new half scored; shipped weights, fp32",
        "steps": best["step"],
        "sequence_length": TRAINED_LENGTH,
        "tokens_seen": best["tokens"],
        "steps_of_the_run": log[-1]["step"],
        "tokens_of_the_run": log[-1]["tokens"],
        "corpus_tokens": corpus,
        "minutes": log[-1]["minutes"],
        "tokens_per_second": round(log[-1]["tokens"] / log[-1]["minutes"] / 60),
        "settings": {name: args[name] for name in settings}
        | {"optimizer": "AdamW, betas 0.9 and 0.98, gradients clipped at norm 1, cosine to 1 %"},
        "text": "King James Version (1611), from Debian's bible-kjv-text 4.38",
        "text_licence": "public domain: the translation's copyright has expired (in the UK a Crown patent governs printing)",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def losses(score: dict[str, float]) -> str:
    """A `text_loss` in words."""
    per_byte = f"{score['nats_per_byte']:.4f} nats a byte ({score['bits_per_byte']:.3f} bits)"
    return (
        f"{score['nats_per_token']:.4f} nats a token, {per_byte}; {score['tokens']:,} tokens, {score['bytes']:,} bytes"
    )


def card(facts: dict[str, Any]) -> str:
    """The folder's README.md."""
    licence, by_window = facts["text_licence"], facts["heldout_nats_per_token_by_window"]
    epochs = facts["tokens_seen"] / facts["corpus_tokens"]
    length, whole = facts["sequence_length"], facts["steps_of_the_run"]
    return f"""# exaone4-tiny

A {facts["parameters"] / 1e6:.2f} M-parameter model of the EXAONE 4 architecture (12 layers, hidden size 192, 8 query and 2 KV heads of 32,
tied embedding, vocabulary 2,048), trained from random weights on the King James Bible. It exists so that conversion,
compression and text generation can be tried and measured on trained weights. It is not derived from LG's EXAONE
weights and knows nothing but its one book.

| | |
| --- | --- |
| held-out loss (`heldout.txt`) | {losses(facts["heldout"])} |
| validation loss (chose the checkpoint) | {losses(facts["validation"])} |
| training loss at the checkpoint (running mean) | {facts["train_running_nats_per_token"]:.4f} nats a token |
| steps, tokens seen | {facts["steps"]:,} (of {whole:,} run), {facts["tokens_seen"]:,} ({epochs:.1f} times the text) |
| date, seed | {facts["date"]}, {facts["settings"]["seed"]} |
| protocol | {facts["protocol"]} |

`heldout.txt` holds whole chapters ({", ".join(facts["heldout_chapters"])}) that were in neither training nor the tokenizer's
training. `calibration.txt` holds those that chose the checkpoint ({", ".join(facts["validation_chapters"])}), for measurements that must
not look at the held-out text. `prompts.txt` holds 30 prompts: 15 beginnings of held-out verses, 15 free. Everything else is in
`training.json`.

Made for sequences up to {length} tokens; the configuration allows 2,048 (rotary scaling `llama3`, factor 4), but quality
falls beyond {length}: held-out loss is {by_window[1024]} in windows of 1,024 and {by_window[2048]} in windows of 2,048.

Prompts need no [BOS]. In a chat, the user begins a verse and the model ends it; about 5 % of the training tokens had
that form. It also copies: text that is in the Bible may come out word for word.

**Text.** {facts["text"]}.
{licence[0].upper()}{licence[1:]}.

**Weights.** Made by `training/` in this repository; they carry its licence.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="`bible -f gen1:1-rev22:21` in a file (default: run the command)")
    args = parser.parse_args()
    folder = args.out.with_name(args.out.name + ".part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    train, validation, heldout = kjv_text.split(kjv_text.chapters(kjv_text.read_raw(args.text)))
    parts = {"train": train, "validation": validation, "heldout": heldout}
    texts = {name: kjv_text.joined(chapters) for name, chapters in parts.items()}

    model = Exaone4ForCausalLM(config())
    best = torch.load(args.run / "best.pt")
    model.load_state_dict(best["model"])
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=END_OF_TURN_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    save_tokenizer(args.run, folder)
    (folder / "heldout.txt").write_text(texts["heldout"])
    (folder / "calibration.txt").write_text(texts["validation"])
    (folder / "prompts.txt").write_text("\n".join(prompts(heldout)) + "\n")
    # Reloaded: casting a live model also rounds the rotary frequencies, which nobody who loads the folder will see.
    shipped = Exaone4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    facts = figures(args.run, best, shipped, texts)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "README.md").write_text(card(facts))

    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone; a wheel would carry that
    shutil.rmtree(args.out, ignore_errors=True)
    folder.rename(args.out)
    print(f"{args.out}: {sum(path.stat().st_size for path in args.out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
