"""Limits in which one thing must equal another, to the bit where it says so."""

from pathlib import Path

import pytest
import torch

from fedvit.core import tree
from fedvit.core.payload import Payload
from fedvit.core.plan import client_round
from fedvit.core.training import descend
from fedvit.engine.checkpoint import load_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.worker import load_data
from fedvit.models.build import ModelSettings, build
from fedvit.models.plugins.modules import PromptTokens
from fedvit.models.plugins.specs import Adapter, Lora, Prefix, Prompt
from fedvit.models.token_skipping import skip_unread_tokens_
from fedvit.runs.folder import Run
from tests.conftest import Bench, finish, same_trees, tiny

IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
MICRO = ModelSettings()


def logits(*plugins: object) -> torch.Tensor:
    model = build(MICRO, 10, plugins, seed=3).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        return model(IMAGES)


@pytest.mark.parametrize(
    "plugin",
    [
        Prefix(s=0.0),
        Prefix(s=0.0, bottleneck=None, init="random"),
        Prefix(init="zero"),
        Prefix(bottleneck=None, init="zero"),
        Lora(),
        Adapter(),
        Adapter(per_layer=True, activation="tanh"),
    ],
    ids=str,
)
def test_a_plugin_that_adds_nothing_is_the_plain_vit(plugin: object) -> None:
    assert torch.equal(logits(plugin), logits())


def test_a_random_prefix_changes_the_model() -> None:
    for plugin in (
        Prefix(),
        Prefix(bottleneck=None, init="random"),
        Prompt(),
        Prefix(bottleneck=None, combine="concat"),
    ):
        assert not torch.equal(logits(plugin), logits())


def test_plugins_leave_the_backbone_as_it_was_drawn() -> None:
    plain, plugged = build(MICRO, 10, (), 3), build(MICRO, 10, (Prefix(), Prompt()), 3)
    assert same_trees(
        dict(plain.named_parameters()), tree.pick(dict(plugged.named_parameters()), dict(plain.named_parameters()))
    )


def test_an_adapter_may_start_as_in_the_papers_pseudo_code() -> None:
    """Two plain linear layers, as PyTorch draws them; by default the second one starts at zero."""
    up = build(MICRO, 10, (Adapter(init="random"),), 3).adapter.up  # type: ignore[union-attr]
    bound = up.in_features**-0.5
    assert 0.9 * bound < up.weight.abs().max() <= bound
    assert not torch.equal(logits(Adapter(init="random")), logits())
    assert torch.equal(logits(Adapter(init="zero")), logits())


def test_prompts_that_start_at_zero_stay_equal_within_a_block(tmp_path: Path) -> None:
    """Why FedPEFT's pseudo-code is not what runs by default."""
    trees = {}
    for init in ("zero", "uniform"):
        bench = Bench(tiny("fedavg+prompt", {"tune.init": init, "optimizer": "sgd"}, lr=0.5), tmp_path / init)
        end = descend(bench.worker.client("3", 1, {}), bench.net.initial)
        trees[init] = [tokens for name, tokens in end.items() if name.endswith("prompt.tokens")]
    assert len(trees["zero"]) == 4
    for tokens in trees["zero"]:
        assert tokens.abs().max() > 1e-4, "they learn"
        assert (tokens - tokens[0]).abs().max() < 1e-3 * tokens.abs().max(), "but together"
    assert all((tokens - tokens[0]).abs().max() > 0.01 for tokens in trees["uniform"])


def test_dropout_of_prompts_draws_a_mask_for_every_image() -> None:
    prompt = PromptTokens(6, 40, 1.0, 0.5).train()
    torch.manual_seed(0)
    dropped = prompt(torch.zeros(8, 3, 40))[:, 3:] == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert all(not torch.equal(dropped[0], other) for other in dropped[1:])
    assert torch.equal(prompt.eval()(torch.zeros(2, 3, 40))[1, 3:], prompt.tokens)


def test_prompts_are_dropped_after_every_block() -> None:
    model = build(MICRO, 10, (Prompt(tokens=7),), 0).eval()
    seen = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    features = model.forward_features(IMAGES)
    assert seen == [17 + 7] * 4
    assert features.shape[1] == 17


def test_the_mean_of_equal_trees_is_that_tree_to_the_bit() -> None:
    one = {"w": torch.randn(1000), "b": torch.randn(3) * 1e-6}
    assert same_trees(tree.mean([(3.0, one), (7.0, one), (13.0, one)]), one)


def test_the_mean_weighs_by_samples() -> None:
    a, b = {"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}
    assert tree.mean([(1, a), (3, b)])["w"].item() == 3.0


def test_local_training_is_a_bare_pytorch_loop(tmp_path: Path) -> None:
    bench = Bench(tiny("fedavg", {"optimizer": "sgd", "momentum": 0.5}, lr=0.05), tmp_path)
    client = bench.worker.client("3", 1, {})
    batches = list(client.batches(1, "train"))
    end = descend(client, bench.net.initial)

    torch.manual_seed(0)
    model = build(bench.experiment.model, 10, (), bench.experiment.run.seed)
    skip_unread_tokens_(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5, fused=True)
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert same_trees(end, {name: p.detach() for name, p in model.named_parameters()})


def test_one_round_of_fedavg_is_the_weighted_mean_of_its_clients(tmp_path: Path) -> None:
    bench = Bench(tiny(rounds=1), tmp_path)
    from fedvit.engine.loop import federate

    done = next(federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples))
    down = Payload({"shared": bench.server.shared})
    ends, sizes = [], []
    for name in done.row["cohort"]:
        client = bench.worker.client(name, 1, {})
        ends.append(client_round(bench.net.plan, client, down).trees["shared"])
        sizes.append(len(bench.split.clients[name].train))
    for name, tensor in done.server.shared.items():
        expected = sum(n * end[name].double() for n, end in zip(sizes, ends, strict=True)) / sum(sizes)
        assert torch.equal(tensor, expected.float())


def final_weights(folder: Path, client: str) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in Run(folder).model(client).named_parameters()}


def test_fedper_under_head_tuning_is_local_head_tuning(tmp_path: Path) -> None:
    a, b = (finish(tiny(label), tmp_path / label) for label in ("fedper+head", "local+head"))
    assert Run(a).summary["views"] == Run(b).summary["views"]
    assert same_trees(final_weights(a, "1"), final_weights(b, "1"))


def test_custom_head_is_fedper(tmp_path: Path) -> None:
    a, b = finish(tiny("custom"), tmp_path / "a"), finish(tiny("fedper"), tmp_path / "b")
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()


def test_fedbn_without_trained_norms_is_fedavg(tmp_path: Path) -> None:
    a, b = finish(tiny("fedbn+head"), tmp_path / "a"), finish(tiny("fedavg+head"), tmp_path / "b")
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()


def test_fedavg_ft_serves_fedavgs_model(tmp_path: Path) -> None:
    a, b = finish(tiny("fedavg_ft"), tmp_path / "a"), finish(tiny("fedavg"), tmp_path / "b")
    assert Run(a).summary["views"]["server"] == Run(b).summary["views"]["server"]
    assert Run(a).summary["views"]["personal"] != Run(b).summary["views"]["personal"]


def test_local_on_every_round_trains_everybody(tmp_path: Path) -> None:
    run = Run(finish(tiny("local", {"method.schedule": "every_round"}), tmp_path))
    assert [client["rounds_trained"] for client in run.clients] == [2] * 12
    assert run.summary["gain_over_local"] == {"mean": 0.0, "hurt": 0, "schedule": "every_round"}


def test_centralized_is_one_client_with_all_images(tmp_path: Path) -> None:
    experiment = tiny("centralized", rounds=1)
    folder = finish(experiment, tmp_path)
    _, split = load_data(experiment)
    assert Run(folder).rounds[0]["cohort"] == ["/pooled"]
    bench = Bench(experiment, tmp_path / "bench")
    assert len(bench.worker.part("/pooled").train) == sum(len(part.train) for part in split.clients.values())
    end = descend(bench.worker.client("/pooled", 1, {}), bench.net.initial)
    saved = load_checkpoint(folder / "checkpoint", ClientStore(folder / "checkpoint", in_ram=True), clean=False)
    assert saved is not None
    assert same_trees(saved.shared, end)


def test_fedrep_moves_the_head_first_and_only_then_the_body(tmp_path: Path) -> None:
    from fedvit.methods.fedrep import head_then_body

    bench = Bench(tiny("fedrep"), tmp_path)
    client = bench.worker.client("0", 1, {})
    end = head_then_body(client, bench.net.initial, head_epochs=1, body_epochs=0)
    body = bench.net.roles.shared
    assert same_trees(tree.pick(end, body), tree.pick(bench.net.initial, body))
    assert not same_trees(
        tree.pick(end, bench.net.roles.personal), tree.pick(bench.net.initial, bench.net.roles.personal)
    )


def test_fedbabu_forgets_its_finetuned_head(tmp_path: Path) -> None:
    bench = Bench(tiny("fedbabu"), tmp_path)
    client = bench.worker.client("0", 1, {})
    x = next(iter(client.batches(1, "look")))[0]
    down = Payload({"shared": bench.server.shared})
    tuned = client.net(bench.net.plan.views(client, down)["personal"])(x)
    plain = client.net(bench.server.shared)(x)
    assert not torch.equal(tuned, plain)
    whole = Bench(tiny("fedbabu", {"finetune": "all", "steps": 3}), tmp_path)
    owner = whole.worker.client("0", 1, {})
    other = owner.net(whole.net.plan.views(owner, down)["personal"])(x)
    assert not torch.equal(tuned, other)


def test_testing_inside_the_round_leaves_centralized_alone(tmp_path: Path) -> None:
    a, b = tiny("centralized", {"evaluate": "in_round"}), tiny("centralized")
    assert Run(finish(a, tmp_path / "a")).clients == Run(finish(b, tmp_path / "b")).clients


def test_memory_on_disk_gives_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = finish(tiny("fedper", rounds=3), tmp_path / "a")
    monkeypatch.setattr("fedvit.runs.execute.free_ram", lambda: 0)
    b = finish(tiny("fedper", rounds=3), tmp_path / "b")
    assert "kept on disk" in (b / "log.txt").read_text()
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()


def test_testing_inside_the_round_uses_each_clients_own_weights(tmp_path: Path) -> None:
    after = Run(finish(tiny("fedavg", rounds=1), tmp_path / "after"))
    inside = Run(finish(tiny("fedavg", {"evaluate": "in_round"}, rounds=1), tmp_path / "inside"))
    bench = Bench(tiny("fedavg", rounds=1), tmp_path / "bench")
    cohort = inside.rounds[0]["cohort"]
    for row in inside.clients:
        shared = bench.server.shared  # clients that were not sampled are tested with the incoming weights
        if row["client"] in cohort:
            client = bench.worker.client(row["client"], 1, {})
            shared = client_round(bench.net.plan, client, Payload({"shared": shared})).trees["shared"]
        down = Payload({"shared": shared}, {"round": 1})
        expected = bench.worker.evaluate(row["client"], down, {})[0]["personal_loss"]
        assert row["personal_loss"] == expected
    assert after.clients != inside.clients


@pytest.mark.parametrize("tune", ["full", "bias"])
def test_heterofl_at_full_width_without_masking_is_fedavg_of_equal_clients(tune: str, tmp_path: Path) -> None:
    a = finish(tiny(f"heterofl+{tune}", {"rates": 1, "masking": False}), tmp_path / "a")
    b = finish(tiny(f"fedavg+{tune}", {"weighting": "equal"}), tmp_path / "b")
    for name in ("clients.csv", "rounds.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    assert same_trees(final_weights(a, "1"), final_weights(b, "1"))
