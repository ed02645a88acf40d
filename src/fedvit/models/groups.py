"""The layer groups of a model: which weights belong to attention, norms, the classifier and so on."""

from collections.abc import Iterable

from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn

from fedvit.core.errors import UserError, nearest
from fedvit.core.roles import Selector, of_type, segment, state_names, under
from fedvit.models.plugins.attach import classifier_names, groups_of_model
from fedvit.models.plugins.specs import KINDS

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)
GROUPS = ("patch_embed", "pos_embed", "tokens", "norm", "attn", "mlp", "scale", "head")
TOKENS = ("cls_token", "dist_token", "reg_token")


def name_groups_(model: nn.Module, groups: dict[str, list[str]]) -> None:
    """Give the model its own layer groups; a path that matches no weight is an error."""
    for name, paths in groups.items():
        for path in paths:
            Selector(f"{path} (of the layer group {name})", under(path).match).names(model)
    model.layer_groups = groups  # type: ignore[assignment]


def group(name: str) -> Selector:
    """Select a layer group by its name: one of the model itself, one of GROUPS, blocks.N, or a plugin."""

    def match(model: nn.Module) -> set[str]:
        named = groups_of_model(model)
        return (under(*named[name]) if name in named else _known_group(name, named)).match(model)

    return Selector(name, match)


def check_groups(names: str, named: Iterable[str] = ()) -> None:
    """Raise an error for unknown layer groups."""
    for name in (part.strip() for part in names.split(",")):
        if name and name not in named:
            _known_group(name, named)


def _known_group(name: str, named: Iterable[str] = ()) -> Selector:
    """Select a layer group that does not depend on the model: one of GROUPS, blocks.N, or a plugin."""
    match name:
        case "head":
            return Selector("head", lambda model: under(*classifier_names(model)).match(model))
        case "norm":
            return of_type("norm", *NORMS)
        case "scale":
            return of_type("scale", LayerScale)
        case "tokens":
            return Selector("tokens", under(*TOKENS).match)
        case "patch_embed" | "pos_embed":
            return under(name)
        case "attn" | "mlp":
            return segment(name)
    if name in KINDS:
        return Selector(name, segment(name).match)
    if name.startswith("blocks.") and name.removeprefix("blocks.").isdigit():
        return under(name)
    raise UserError(f"unknown layer group {name!r}; {nearest(name, [*GROUPS, *KINDS, 'blocks.0', *named])}")


def groups(names: str) -> Selector:
    """Select several layer groups, joined by commas."""
    chosen = [group(part.strip()) for part in names.split(",") if part.strip()]
    if not chosen:
        raise UserError(f"expected layer groups joined by commas, found {names!r}; {nearest('', GROUPS)}")
    joined = chosen[0]
    for more in chosen[1:]:
        joined = joined | more
    return joined


head = group("head")
norm = group("norm")
attn = group("attn")


last_block = Selector("last block", lambda model: under(f"blocks.{len(getattr(model, 'blocks', ())) - 1}").match(model))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return the live tensors of a model under their state names: parameters and float buffers."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensors[name] for name in state_names(model)}
