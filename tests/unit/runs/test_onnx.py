"""ONNX files say what PyTorch says, for any batch. A conversion takes seconds, so a few models stand for all."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedvit
from fedvit.runs.folder import Run
from fedvit.runs.model_file import TOLERANCE, check_images
from tests.conftest import finish
from tests.unit.cli.test_command_line import call
from tests.unit.runs.test_export import digits, scored, small, written


# A folded one; two passes as one batch, with prompts; one that ends early, in convolutions.
@pytest.mark.parametrize("label", ["prefix_z", "distrans+prompt", "fesvibs"])
def test_onnx_says_what_pytorch_says(label: str, tmp_path: Path) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="needs fedvit[onnx]")
    run = Run(finish(small(label, rounds=1), tmp_path / "run", dataset=digits()))
    (one,) = written(run, tmp_path / "out", "1", form="onnx")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["client-1.card.md", "client-1.onnx"], "the weights are inside"
    import onnxruntime

    session = onnxruntime.InferenceSession(one.path, providers=["CPUExecutionProvider"])
    model, images = run.model("1"), check_images(one.description)
    for count in (1, 5, 16):
        (found,) = session.run(None, {"images": images[:count].numpy()})
        with torch.no_grad():
            expected = model(images[:count])
        assert (torch.from_numpy(found) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1)
    described = json.loads(session.get_modelmeta().custom_metadata_map["fedvit"])
    assert session.get_modelmeta().custom_metadata_map["model_card"] == one.card.read_text()
    assert described["classes"] == list("0123456789")
    assert described["input"]["size"] == 8
    assert scored(fedvit.load_model(one.path), run, "1")["accuracy"] == run.clients[1]["personal_accuracy"]


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: Any) -> None:
    run = finish(small("fedper", rounds=1), tmp_path / "run", dataset=digits())
    for name in ("onnx", "onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    status, _, message = call("export", run, "--client", "1", "--format", "onnx", "--out", tmp_path / "x")
    assert status == 2
    assert "pip install 'fedvit[onnx]'" in message.replace("\n", " ")
    (tmp_path / "m.onnx").write_bytes(b"graph")
    status, _, message = call("predict", tmp_path / "m.onnx", tmp_path)
    assert (status, "fedvit[onnx]" in message) == (2, True)
