"""Random training programs against plain torch (see `tests/harness/fuzz.py`)."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.harness.fuzz import failure_of, report, run_recipes
from tests.harness.fuzz_recipes import Net, Op, Part, Recipe, draw, draw_stage_3, shrink

SEEDS = range(30)
SEEDS_STAGE_3 = range(1000, 1030)


def _by_world_size() -> dict[int, list[Recipe]]:
    grouped: dict[int, list[Recipe]] = defaultdict(list)
    for recipe in (*map(draw, SEEDS), *map(draw_stage_3, SEEDS_STAGE_3)):
        grouped[recipe.world_size].append(recipe)
    return grouped


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_random_programs_train_as_plain_torch(pool, world_size: int) -> None:
    recipes = _by_world_size()[world_size]
    try:
        found = pool.run(world_size, run_recipes, tuple(recipes), timeout=240.0)
        failing = {recipes[index] for lines in found for index, _ in lines}
    except Exception:
        # One of them raised or hung and took the others along: try each alone.
        failing = {recipe for recipe in recipes if failure_of(pool, recipe)}
    texts = []
    for recipe in sorted(failing, key=lambda recipe: recipe.seed)[:3]:
        small = shrink(recipe, lambda candidate: failure_of(pool, candidate, 20.0), budget_s=20.0)
        texts.append(report(small, failure_of(pool, small) or "passes when run alone: it depends on an earlier recipe"))
    assert not failing, f"{len(failing)} of {len(recipes)} recipes fail\n" + "\n\n".join(texts)


def test_a_recipe_is_its_own_reproducer() -> None:
    recipe = draw(7)
    assert eval(repr(recipe), {"Recipe": Recipe, "Net": Net, "Op": Op, "Part": Part}) == recipe
    assert draw(7) == recipe
    assert draw(8) != recipe


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    """A made-up fault: stage 1 with a small bucket and a frozen parameter fails at any micro-step."""

    def fails(recipe: Recipe) -> str:
        small_bucket = dict(recipe.zero).get("reduce_bucket_size", 10**9) < 10
        micro = any(op.kind == "micro" for op in recipe.ops)
        return "bad" if recipe.stage == 1 and small_bucket and recipe.net.frozen and micro else ""

    full = Recipe(
        seed=3,
        world_size=4,
        net=Net(dims=(3, 4, 5, 6), extras=((),), idle=((2,),), frozen=(1,)),
        stage=1,
        precision="bf16",
        accumulation=2,
        clip=0.3,
        num_groups=2,
        zero=(("reduce_bucket_size", 8), ("overlap_comm", True)),
        ops=tuple(Op("micro", (Part(2), Part(1, raw=True))) for _ in range(4)),
    )
    assert fails(full)
    small = shrink(full, fails)
    assert small == Recipe(
        seed=3,
        world_size=1,
        net=Net(dims=(3, 4), frozen=(1,)),
        stage=1,
        zero=(("reduce_bucket_size", 8),),
        ops=(Op("micro", (Part(),)),),
    )
