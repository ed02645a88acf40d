"""What a study is: data, which `fedvit.studies.run` runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedvit.studies.cases import Case

Kind = Literal["accuracy", "choose", "target", "cost", "gains", "features", "prefix"]


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it: a small grid and the published one.

    `digits` is its small grid on the embedded digits. `pretrained` is its small grid on real images with a ViT-Tiny
    pre-trained on ImageNet; it replaces `digits` if the data folder has both. `paper` is the published grid.

    The kind `choose` marks the best row of every column on validation images, `target` measures what it costs to reach
    given accuracies, `cost` trains nothing, `gains` draws what every client gains over Local, `features` draws what the
    models see, and `prefix` shows the share of attention that goes to concatenated prefixes.
    """

    asks: str
    source: str
    kind: Kind
    view: Literal["personal", "server"]
    columns: str  # what the columns vary
    digits: Sequence[Case]
    paper: Sequence[Case]
    minutes: tuple[float, float | None]  # estimates for one core, on digits and on pre-trained weights
    pretrained: Sequence[Case] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)  # on digits; a grid on pre-trained weights has seed 0
    paper_seeds: tuple[int, ...] = ()  # of the published grid; if empty, the one in its settings
    overall: bool = False  # also report the mean over the columns
    note: str = ""  # the caption of a table of costs, or of a matrix of the published grid
    costs: Mapping[str, str] | None = None  # published beside the accuracies, which then show ours as well
    aka: tuple[str, ...] = ()  # the study's other names
