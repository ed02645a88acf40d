"""Exact numbers of the papers' resource tables, re-derived (FedPerfix in units of 2^20, FedPEFT in 10^6)."""

import json

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app

SMALL = ["--model", "vit_small_patch16_224", "--classes", "1000"]
BASE = ["--model", "vit_base_patch16_224", "--classes", "100", "--method", "fedavg"]


def cost(*arguments: str) -> dict[str, dict[str, int]]:
    result = CliRunner().invoke(app, ["cost", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("method", "total", "shared"),
    [
        ("fedavg", 22_050_664, 22_050_664),
        ("fedbn", 22_050_664, 22_031_464),
        ("fedper", 22_050_664, 21_665_664),
        ("fedbabu", 22_050_664, 21_665_664),
        ("vanilla_attention", 22_050_664, 14_569_344),
        ("fedperfix", 25_601_896, 21_665_664),
        ("prefix_z", 25_598_824, 21_665_664),
        ("local", 22_050_664, 0),
    ],
)
def test_vit_small_with_1000_classes(method: str, total: int, shared: int) -> None:
    result = cost(*SMALL, "--method", method)
    assert result["params"]["total"] == total
    assert result["params"]["shared"] == shared
    assert result["nbytes"] == {"down": 4 * shared, "up": 4 * shared}


def test_macs_of_vit_small_at_224() -> None:
    assert cost(*SMALL)["macs_per_example"] == 4_598_882_304
    # 12 side adapters on 197 tokens: 384 -> 256 -> 768
    assert cost(*SMALL, "--method", "fedperfix")["macs_per_example"] == 4_598_882_304 + 697_171_968


@pytest.mark.parametrize(
    ("tune", "shared"),
    [("bias", 179_812), ("adapter", 225_220), ("prompt", 169_060), ("head", 76_900), ("full", 85_875_556)],
)
def test_vit_base_with_100_classes(tune: str, shared: int) -> None:
    result = cost(*BASE, "--tune", tune)
    assert result["params"]["shared"] == result["params"]["trainable"] == shared
    assert result["nbytes"] == {"down": 4 * shared, "up": 4 * shared}


@pytest.mark.parametrize(
    ("tune", "shared"), [("bias", 104_450), ("adapter", 149_858), ("prompt", 93_698), ("head", 1_538)]
)
def test_vit_base_with_the_two_classes_of_pcam(tune: str, shared: int) -> None:
    """FedPEFT's Table 1 prints the counts of 100 classes for PCam, too."""
    arguments = ["--model", "vit_base_patch16_224", "--classes", "2", "--method", "fedavg", "--tune", tune]
    assert cost(*arguments)["params"]["shared"] == shared


@pytest.mark.parametrize(("classes", "shared"), [("100", 444_292), ("2", 343_842)])
def test_shufflenet(classes: str, shared: int) -> None:
    result = cost("--model", "shufflenet_v2_x0_5", "--classes", classes)
    assert result["params"]["trainable"] == shared


def test_one_adapter_per_layer() -> None:
    assert cost(*BASE, "--tune", "adapter", "--set", "per_layer=true")["params"]["shared"] == 1_856_740


@pytest.mark.parametrize(
    ("tune", "shared"),
    [("full", 21_704_164), ("head", 38_500), ("bias", 89_956), ("adapter", 75_796), ("prompt", 84_580)],
)
def test_vit_small_with_100_classes(tune: str, shared: int) -> None:
    result = cost("--model", "vit_small_patch16_224", "--classes", "100", "--tune", tune)
    assert result["params"]["shared"] == shared


def test_lora_has_rank_8_on_the_joint_projection() -> None:
    result = cost("--model", "vit_small_patch16_224", "--classes", "100", "--tune", "lora")
    assert result["params"]["shared"] == 38_500 + 12 * 8 * (384 + 3 * 384)


def test_a_personal_last_block_is_kept_at_home() -> None:
    result = cost(*SMALL, "--method", "fedperfix", "--set", "last_block=true")
    assert result["params"]["shared"] == 21_665_664 - 1_774_464


def test_layer_groups_of_vit_small() -> None:
    expected = {
        "patch_embed": 295_296,
        "pos_embed": 75_648,
        "tokens": 384,
        "norm": 19_200,
        "attn": 7_096_320,
        "mlp": 14_178_816,
        "blocks.3": 1_774_464,
    }
    for group, count in expected.items():
        result = cost(*SMALL, "--tune", group)
        assert result["params"]["trainable"] == count + 385_000, group  # the head is always trained
