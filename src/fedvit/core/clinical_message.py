"""A site's clinical scores as numbers in a message, and the check of such numbers when they arrive.

They are counts, sums and scores of all test images of a class, never a single image's: a bin with fewer than FEW
images stands for them with its middle. Names are personal_clinical_<what>_<class>, and personal_clinical_patients.
"""

from collections.abc import Iterable, Mapping

from fedvit.core.cases import SOURCES
from fedvit.core.clinical import BINS, WITH_INTERVALS, Bin, ClassScore, SiteScore

CLINICAL = "clinical"
PREFIX = f"personal_{CLINICAL}_"
PATIENTS = f"{PREFIX}patients"
COUNTS = ("tp", "fp", "tn", "fn")
MOST = 10**9  # images
FEW = 5  # images in a bin, below which the sum of their probabilities would tell about a single one
_BIN = ("bin_images", "bin_probability", "bin_positives")  # followed by the number of the bin
_ENDS = [f"{metric}_{end}" for metric in WITH_INTERVALS for end in ("low", "high")]
_ALWAYS = (*COUNTS, "squares", "threshold", "source")
_RANKED = ("auroc", "average_precision")  # defined if an image is positive and another is not
_SLACK = 1e-6  # per image: sums are rounded


def to_scalars(score: SiteScore) -> dict[str, float]:
    """Return a site's scores by name; what is undefined or an empty bin is left out."""
    found: dict[str, float] = {} if score.patients is None else {PATIENTS: float(score.patients)}
    for one in score.classes:
        own: dict[str, float] = {name: float(getattr(one, name)) for name in COUNTS}
        own |= {"squares": one.squares, "threshold": one.threshold or 0.0, "source": SOURCES.index(str(one.source))}
        for name in _RANKED:
            if one.metric(name) is not None:
                own[name] = float(one.metric(name) or 0.0)
        for number, place in enumerate(one.bins):
            if place.images:
                middle = place.images * (number + 0.5) / BINS
                values = (place.images, middle if place.images < FEW else place.probability, place.positives)
                own |= {f"{name}{number}": float(value) for name, value in zip(_BIN, values, strict=True)}
        for metric, ends in one.intervals.items():
            own |= {f"{metric}_low": ends[0], f"{metric}_high": ends[1]}
        found |= {f"{PREFIX}{name}_{one.number}": value for name, value in own.items()}
    return found


def from_scalars(scalars: Mapping[str, float]) -> SiteScore | None:
    """Return the scores that `to_scalars` wrote, which have been checked; None if there are none."""
    by_class = _by_class(scalars)
    if not by_class:
        return None
    patients = scalars.get(PATIENTS)
    classes = tuple(_class_score(number, by_class[number]) for number in sorted(by_class))
    return SiteScore(None if patients is None else int(patients), classes)


def _class_score(number: int, own: Mapping[str, float]) -> ClassScore:
    tp, fp, tn, fn = (int(own[name]) for name in COUNTS)
    bins = []
    for place in range(BINS):
        images, probability, positives = (own.get(f"{name}{place}", 0.0) for name in _BIN)
        bins.append(Bin(int(images), float(probability), int(positives)))
    intervals = {
        metric: (own[f"{metric}_low"], own[f"{metric}_high"]) for metric in WITH_INTERVALS if f"{metric}_low" in own
    }
    return ClassScore(
        number, tp, fp, tn, fn, own["squares"], own.get("auroc"), tuple(bins), own["threshold"],
        SOURCES[int(own["source"])], intervals, own.get("average_precision"),
    )  # fmt: skip


def _by_class(scalars: Mapping[str, float]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for key, value in scalars.items():
        if key.startswith(PREFIX) and key != PATIENTS:
            name, _, number = key.removeprefix(PREFIX).rpartition("_")
            found.setdefault(int(number), {})[name] = value
    return found


def is_clinical(name: str) -> bool:
    """Return whether this is a clinical score's name, right or wrong."""
    return name.startswith(PREFIX)


def clinical_problem(scalars: Mapping[str, float], classes: int) -> str | None:
    """Describe what is wrong with the clinical scores among these without quoting a value; None if nothing is."""
    known = {*_ALWAYS, *_RANKED, *_ENDS, *(f"{name}{number}" for name in _BIN for number in range(BINS))}
    numbers = {str(number): number for number in range(classes)}
    for key, value in scalars.items():
        if not is_clinical(key):
            continue
        name, _, number = key.removeprefix(PREFIX).rpartition("_")
        if key != PATIENTS and (name not in known or number not in numbers):
            return f"no score is called {key[:60]!r}"
        if not 0 <= value <= MOST:
            return f"{key[:60]!r} is not a number from 0 to {MOST}"
    by_class = _by_class(scalars)
    if PATIENTS in scalars and (not by_class or not _is_whole(scalars[PATIENTS])):
        return f"{PATIENTS!r} is not a number of patients of an image that was scored"
    wrong = (_class_problem(number, own) for number, own in by_class.items())
    problem = next((text for text in wrong if text is not None), None)
    if problem is None and len({sum(own[name] for name in COUNTS) for own in by_class.values()}) > 1:
        return "the clinical scores of the classes are of different numbers of images"
    return problem


def _class_problem(number: int, own: Mapping[str, float]) -> str | None:
    """Describe what is wrong with one class: something is missing, or two of its numbers contradict each other."""
    missing = next((name for name in _ALWAYS if name not in own), None)
    if missing is not None:
        return f"the clinical score {missing}_{number} is missing"
    counts = [*COUNTS, *(name for name in own if name.startswith(("bin_images", "bin_positives")))]
    fraction = next((name for name in counts if not _is_whole(own[name])), None)
    if fraction is not None:
        return f"the clinical score {fraction}_{number} is not a number of images"
    images, positives = sum(own[name] for name in COUNTS), own["tp"] + own["fn"]
    sums = {name: [own.get(f"{name}{place}", 0.0) for place in range(BINS)] for name in _BIN}
    per_bin = list(zip(*(sums[name] for name in _BIN), strict=True))
    sound = {
        "the counts": images > 0,
        "the threshold": 0 < own["threshold"] < 1 and own["source"] in range(len(SOURCES)),
        "the sum of squares": own["squares"] <= images * (1 + _SLACK),
        "the bins": (sum(sums["bin_images"]), sum(sums["bin_positives"])) == (images, positives)
        and all(p <= n * (1 + _SLACK) and t <= n for n, p, t in per_bin),
        "the AUROC": all(own.get(name, 0.0) <= 1 and (name in own) == (0 < positives < images) for name in _RANKED),
        "the intervals": _are_intervals(own),
    }
    wrong = next((what for what, fine in sound.items() if not fine), None)
    return None if wrong is None else f"{wrong} of class {number}: these clinical scores are impossible"


def _are_intervals(own: Mapping[str, float]) -> bool:
    def fine(ends: Iterable[float | None]) -> bool:
        low, high = ends
        return (low is None and high is None) or (low is not None and high is not None and low <= high <= 1)

    return all(fine((own.get(f"{metric}_low"), own.get(f"{metric}_high"))) for metric in WITH_INTERVALS)


def _is_whole(value: float) -> bool:
    return value == int(value)
