"""Pictures of comparisons and studies, drawn from their folders, for the screen or, as SVG and PDF, for a paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.files import read_json
from fedvit.report.plots import FIGURES
from fedvit.report.statistics import Row
from fedvit.runs.folder import Run
from fedvit.studies.definitions import STUDIES
from fedvit.studies.definitions.study import Study

Content = Mapping[str, Any]  # study.json


def check_figure(path: Path | None, folders: Sequence[Path]) -> None:
    """Refuse a figure that cannot be drawn, before anything is read."""
    if path is None:
        return
    if path.suffix not in FIGURES:
        raise UserError(f"--figure expects a file that ends in {', '.join(FIGURES)}, found {path}")
    if len(folders) > 1 and any(_is_study(folder) for folder in folders):
        raise UserError("--figure draws one study at a time: give its folder alone")


def draw_folder(folders: Sequence[Path], groups: Sequence[Sequence[Row]], path: Path) -> None:
    """Draw a study as in study.png, and anything else as in compare.png: all rows on one dataset and partition."""
    if _is_study(folders[0]):
        content: Content = read_json(folders[0] / "study.json", {})
        draw_study(content, _study_of(content, folders[0]), folders[0], path)
        return
    if len(groups) > 1:
        raise UserError(
            f"--figure draws one dataset and partition, but these folders have {len(groups)}: give fewer folders"
        )
    from fedvit.report.plots import draw_comparison

    rows = [row for row in groups[0] if row.finished]
    draw_comparison({row.label: [Run(r.folder) for r in row.records] for row in rows}, path, comparison_title(rows))


def comparison_title(rows: Sequence[Row]) -> str:
    """Name the data, clients, model and seeds, as `fedvit compare` does."""
    first = next((row for row in rows if row.method == "local"), rows[0]).first
    seeds = sorted({seed for row in rows for seed in row.seeds})
    return (
        f"{first.tables['data']['name']}, {first.tables['partition']['clients']} clients "
        f"({first.tables['partition']['name']}), {first.tables['model']['name']}, {first.planned} rounds, "
        f"seeds {', '.join(map(str, seeds))}"
    )


def trains_nothing(folders: Sequence[Path]) -> bool:
    """Tell whether this is the folder of a study of costs, which has a picture but no runs."""
    return len(folders) == 1 and read_json(folders[0] / "study.json", {}).get("kind") == "cost"


def _is_study(folder: Path) -> bool:
    return (folder / "study.json").is_file()


def _study_of(content: Content, folder: Path) -> Study:
    name = content.get("study")
    if name not in STUDIES:
        raise UserError(f"{folder / 'study.json'} is of a study that this version does not know: {name!r}")
    return STUDIES[name]


def study_title(content: Content) -> str:
    """Name a study, its source and the settings of its first row."""
    first = {**content["settings"], **content["rows"][0]["settings"]}
    seeds = ", ".join(map(str, content["seeds"]))
    where = f"{first['data.name']}, {first['model.name']}, rounds: {first['train.rounds']}, seeds: {seeds}"
    name = content.get("table", content["study"])
    return f"{name} ({content['source']}): {first['model.name'] if content['kind'] == 'cost' else where}"


def draw_study(
    content: Content, study: Study, folder: Path, path: Path, pictures: Mapping[str, Any] | None = None
) -> None:
    """Draw a finished study from study.json and the runs in its folder; `pictures` are features that are known."""
    from fedvit.report import plots
    from fedvit.studies import figures

    title, seeds, rows = study_title(content), content["seeds"], content["rows"]
    runs = {row["runs"]: [Run(folder / row["runs"] / f"seed{seed}") for seed in seeds] for row in rows}
    match study.kind:
        case "cost":
            figures.draw_costs(content, path, title)
        case "features":
            figures.draw_features(pictures or _pictures(rows, runs), path, title)
        case "gains":
            figures.draw_gains(content, path, title)
        case "prefix":
            figures.draw_shares(content, path, title)
        case "target":
            figures.draw_targets(content, runs, path, title)
        case "choose":
            figures.draw_chosen(content, study, path, title)
        case _ if len({row["column"] for row in rows}) > 1:
            figures.draw_columns(content, study, path, title)
        case _:
            plots.draw_comparison({row["row"]: runs[row["runs"]] for row in rows}, path, title, study.view)


def _pictures(rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Compute the features of every row's first seed again."""
    from fedvit.studies.features import picture

    names = [f"{row['row']}, {row['column']}" if row["column"] else row["row"] for row in rows]
    return {name: picture(runs[row["runs"]][0]) for name, row in zip(names, rows, strict=True)}
