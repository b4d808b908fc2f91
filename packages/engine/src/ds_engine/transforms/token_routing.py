"""Random-LTD: in training, some layers see a random part of the tokens, more with every update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ds_config.errors import UnsupportedError
from ds_data.token_dropping import Router, RouterConfig, is_converted, start_routing, stop_routing
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput

__all__ = ["RandomLTD", "Routing"]


class Routing(Transform[RouterConfig, nn.Module]):
    """In the plan if `data_efficiency.data_routing.random_ltd` acts. Its layers were converted before: `convert_to_random_ltd`."""

    name = "random-LTD"

    def decide(self, inputs: TransformInput) -> RouterConfig | None:
        section = inputs.config.data_efficiency.random_ltd
        if section is None:
            return None
        cut = [axis for axis in ("tensor", "sequence", "pipe") if getattr(inputs.mesh, axis) > 1]
        if cut:
            raise UnsupportedError(
                f"random_ltd with layers or sequences that are cut over ranks ({', '.join(cut)}): each rank would draw other tokens",
                code="data-routing-degrees",
                fix="Leave these degrees at 1, or random_ltd out.",
            )
        return RouterConfig.of(section.model_dump(exclude_none=True))

    def plan_rows(self, what: RouterConfig) -> Mapping[str, str]:
        routed = (
            f"{len(what.layers)} of {what.total_layers} layers see {what.min_value} tokens of each sequence at first"
        )
        return {"random-LTD": f"{routed}, {what.max_value} after {what.require_steps} updates"}

    def apply(self, what: RouterConfig, site: BuildContext) -> nn.Module:
        router = Router(what)
        if not site.parts.routes_later or is_converted(site.model):
            start_routing(site.model, router)
        site.followers.append(RandomLTD(router, site.plan.batch.train))
        return site.model

    def undo(self, applied: nn.Module) -> None:
        stop_routing(applied)


class RandomLTD:
    """Moves a router on with the updates: before update k it keeps what its schedule says of step k, the first of which is 0.

    Args:
        train: Samples of a step.
    Attributes:
        router: Of the model.
    """

    def __init__(self, router: Router, train: int) -> None:
        self.router, self._train = router, train
        self.resume(0)

    def step(self) -> None:
        """Advance the token router after an applied update."""
        self.router.update(self.router.step + 1, self._train)

    def resume(self, steps: int) -> None:
        """Go to where a run stands after so many updates of the batch that is configured now."""
        self.router.load_state_dict({"kept": self.router.config.min_value, "step": -1, "consumed": 0})
        for _ in range(steps + 1):
            self.step()
