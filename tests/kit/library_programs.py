"""Programs of accelerate, transformers' Trainer and Lightning, as they are for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: What a program adds for a mesh: it takes names and their values, and returns them with others.
Edit = Callable[..., dict[str, Any]]


def unchanged(**names: Any) -> dict[str, Any]:
    return names


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed here: pip install {name}")


@contextmanager
def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has accelerate, whose states live as long as the process, take this device."""
    state = library("accelerate.state")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    try:
        yield
    finally:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def samples(n: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=draws), torch.randint(3, (n,), generator=draws))


def accelerated(edit: Edit, n: int, accumulate: int = 1, evaluates: bool = True) -> list[Any]:
    """Losses, counts of right answers, and weights of two epochs."""
    accelerator = library("accelerate").Accelerator(gradient_accumulation_steps=accumulate)
    names = edit(model=classifier(), loader=DataLoader(samples(n), batch_size=4), number=torch.Tensor.item)
    model, number = names["model"], names["number"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, names["loader"])
    found: list[Any] = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            found.append(number(loss))
        with torch.no_grad():
            for x, y in loader if evaluates else ():
                answers, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
                found.append((answers == wanted).sum().item())
    return [*found, *weights(model)]


def llama() -> Any:
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def texts(n: int) -> list[dict[str, torch.Tensor]]:
    """Texts of which a part counts, another one of each."""
    draws, found = torch.Generator().manual_seed(2), []
    for i in range(n):
        ids = torch.randint(2, 32, (8,), generator=draws)
        labels = ids.clone()
        labels[: i % 5] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def trainer(edit: Edit, folder: Path, **options: Any) -> Any:
    transformers = library("transformers")
    library("accelerate")  # without which transformers has no Trainer
    names = edit(model=llama())
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4,
        "learning_rate": 0.05, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False, "optim": "sgd", **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings)
    return transformers.Trainer(names["model"], arguments, train_dataset=texts(15), eval_dataset=texts(7))


def logged(it: Any) -> list[float]:
    return [entry[name] for entry in it.state.log_history if "loss" in entry for name in ("loss", "grad_norm")]


def trained(edit: Edit, folder: Path, **options: Any) -> list[Any]:
    """Losses and norms of all steps, what an evaluation and a prediction give, and weights."""
    it = trainer(edit, folder, **options)
    it.train()
    found = [*logged(it), it.evaluate()["eval_loss"], torch.from_numpy(it.predict(texts(7)).predictions)]
    return [*found, *weights(it.model)]


def resumed(edit: Edit, folder: Path) -> list[Any]:
    """What a run logs, and its weights, that goes on from the checkpoint of another one's second step."""
    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01}
    whole = trainer(edit, folder, **options)
    whole.train()
    it = trainer(edit, folder, **options)
    it.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for found, wanted in zip(weights(it.model), weights(whole.model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return [*logged(it), *weights(it.model)]


def saved(edit: Edit, folder: Path) -> list[Any]:
    """What a model has that ``from_pretrained`` has read."""
    edit(model=llama())["model"].save_pretrained(folder)
    return weights(library("transformers").LlamaForCausalLM.from_pretrained(folder))


def lit(folder: Path) -> list[Any]:
    """Weights that Lightning has trained."""
    lightning = library("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    model = Lit()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    it = lightning.Trainer(accelerator="cpu", devices=1, max_steps=3, default_root_dir=str(folder), **quiet)
    it.fit(model, DataLoader(samples(8), batch_size=4))
    return weights(model)
