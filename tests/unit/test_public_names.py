"""The public interface: these names and no others, found without loading PyTorch."""

import subprocess
import sys

import fedvit

PUBLIC = {
    "run", "compare", "load_run", "load_model", "predict", "export", "Plan", "Payload", "Client", "descend", "PERSONAL",
    "SHARED", "FROZEN", "everything", "head", "UserError",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(fedvit.__all__) == PUBLIC
    assert set(dir(fedvit)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(fedvit, name) is not None, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(fedvit, "no_such_name")


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, fedvit; fedvit.UserError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fedavgs_functions_are_the_slots_of_the_class() -> None:
    plan = fedvit.Plan(name="mine")
    for slot in ("dispatch", "merge", "local", "report", "aggregate", "views"):
        assert getattr(plan, slot) is getattr(fedvit.Plan, slot), slot
