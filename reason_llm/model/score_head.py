"""Head of a reward model or a critic: one number from a hidden state, in float32.

It starts from zero, so that the first loss of a reward model is log 2 and the first values are 0.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reason_llm.errors import ModelError, one_line
from reason_llm.files import regular

FILE = "score.safetensors"


def make(width: int, device: torch.device, bias: bool) -> nn.Linear:
    """Linear (width -> 1) of zeros."""
    head = nn.Linear(width, 1, bias=bias, dtype=torch.float32, device=device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def state(head: nn.Linear) -> dict[str, Tensor]:
    """Copies in host memory: ``weight`` (1, D) and, where there is one, ``bias`` (1,)."""
    return {name: t.detach().to("cpu", copy=True) for name, t in head.state_dict().items()}


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write what ``state`` returned into the folder of its adapter."""
    save_file(tensors, str(folder / FILE))


def scale(head: nn.Linear, slope: float, offset: float) -> None:
    """Change a head with a bias so that it computes ``slope * score + offset``."""
    with torch.no_grad():
        head.weight.mul_(slope)
        head.bias.mul_(slope).add_(offset)


def check(folder: Path, width: int) -> None:
    """Check that a folder holds a head that ``load`` can read. Raises ModelError: there is none, or
    as ``load``."""
    if not (folder / FILE).exists():
        raise ModelError(
            f"{folder} holds no {FILE}: it is not a reward model; name the folder adapter of a run "
            "of stage reward"
        )
    load(make(width, torch.device("cpu"), bias=True), folder)


def load(head: nn.Linear, folder: Path) -> None:
    """Load the head's values. A critic takes a reward model's, and keeps its own bias. Raises
    ModelError: the file is damaged or of another model."""
    try:
        head.load_state_dict(head.state_dict() | load_file(regular(folder / FILE)))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{folder / FILE} is damaged or the head of another model ({one_line(error)[:200]}); "
            "name a folder that a reward run wrote"
        ) from error
