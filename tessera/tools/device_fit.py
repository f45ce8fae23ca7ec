"""Plan a recipe for a device: count the memory of a step, and search for changes of the recipe that make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tessera.config.reader import dump_yaml, parse_yaml
from tessera.config.run_config import RunConfig, load_config
from tessera.errors import TesseraError
from tessera.parallel.device_fit import DeviceFit, FitChange
from tessera.parallel.plan_text import DescribedPlan
from tessera.runtime import log
from tessera.tools.device_sizes import DeviceSize, find_size
from tessera.tools.dry_run import Uncountable, device_bytes, for_device, run_roles
from tessera.training.memory_keys import MemoryKey, memory_keys
from tessera.training.setup import build_meta_model

_WORTH = 0.01  # a change must save at least this share of the memory to be suggested
_TIMES = 3  # limit of values to try for one key, such as half, a quarter and an eighth of the micro-batch


def plan_for_device(config: RunConfig, world: int, device: str) -> DescribedPlan:
    """Return the plan of a recipe with `device_fit`: peak memory of a step on the device, and changes to fit it."""
    size = find_size(device, "--device")
    search = _Search(size, world)
    config = for_device(config, size)
    return replace(build_meta_model(config, world).plan, device_fit=search.fit(config))


@dataclass(frozen=True)
class _Count:
    config: RunConfig
    plan: DescribedPlan
    held: int
    total: int
    uncounted: str = ""


class _Search:
    """Search for recipe changes with which a step fits into the memory of a device. Dry runs count the memory."""

    def __init__(self, size: DeviceSize, world: int) -> None:
        self._size, self._world = size, world
        self._usable = size.usable(world)

    def fit(self, config: RunConfig) -> DeviceFit:
        log.logger().info("counting the memory of a step on fake tensors, as on %s", self._size.name)
        first = self._count(config, f"a step on {self._size.name}")
        fit = DeviceFit(
            self._size.name, self._size.total, self._usable, first.held, first.total, uncounted=first.uncounted
        )
        return fit if fit.fits else replace(fit, changes=tuple(self._changes(first)))

    def _changes(self, first: _Count) -> list[FitChange]:
        """Return the first single change that fits, else several changes together, which may still not fit."""
        keys = memory_keys(first.config, self._world, first.plan.layout.modules.blocks)
        for number, key in enumerate(keys, 1):
            tried = self._try(key, first, f"change {number} of {len(keys)}", alone=True)
            if tried is not None and tried.total <= self._usable:
                return [_describe(key, first, tried)]
        changes: list[FitChange] = []
        at = first
        for key in sorted(keys, key=lambda key: not key.while_training):  # first what a resumed run may change
            again: MemoryKey | None = key
            for _ in range(_TIMES):
                if again is None or at.total <= self._usable:
                    break
                tried = self._try(again, at, f"change {len(changes) + 1}", alone=False)
                if tried is None or at.total - tried.total < _WORTH * first.total:
                    break
                changes.append(_describe(again, at, tried))
                at = tried
                further = memory_keys(at.config, self._world, at.plan.layout.modules.blocks)
                # the same recipe keys with other values, such as an even smaller micro-batch
                again = next((other for other in further if other.settings.keys() == key.settings.keys()), None)
        return changes

    def _try(self, key: MemoryKey, at: _Count, phase: str, *, alone: bool) -> _Count | None:
        """Change one setting of a recipe, and return the memory it then needs; None if the new recipe is not valid.

        `alone`: if the weights and optimizer state alone do not fit, return None without a dry run.
        """
        try:
            config = load_config(parse_yaml(dump_yaml(at.config), "recipe"), dict(key.settings))
            plan = build_meta_model(config, self._world).plan
        except TesseraError:
            return None
        if alone and _held(plan) > self._usable:
            return None
        log.logger().info("%s: trying %s", phase, key.text)
        return self._count(config, phase, plan)

    def _count(self, config: RunConfig, phase: str, plan: DescribedPlan | None = None) -> _Count:
        plan = plan or build_meta_model(config, self._world).plan
        held = _held(plan)
        if plan.layout.pipeline is None and plan.microbatches > 2 and config.train.samples_per_step is None:
            # Two micro-batches are enough: from the second on, all need the same memory.
            rows = config.train.global_batch * 2 // plan.microbatches
            shorter = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": rows})})
        else:
            shorter = config
        try:
            roles = run_roles(shorter, self._world, phase)
        except Uncountable as error:
            gradients = 0 if plan.layout.sharding.offload else plan.memory.heaviest.gradients
            return _Count(config, plan, held, held + gradients, error.what)
        most = max(roles, key=lambda role: role.total)
        return _Count(config, plan, most.held, most.total)


def _held(plan: DescribedPlan) -> int:
    """Return the bytes of weights and optimizer state on the rank that has most."""
    return max(device_bytes(plan, position) for position in range(len(plan.memory.by_position)))


def _describe(key: MemoryKey, before: _Count, after: _Count) -> FitChange:
    return FitChange(key.text, key.why, before.total - after.total, after.total)
