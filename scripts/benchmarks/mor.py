"""Forward and backward of one linear layer: MoR with real FP8 products against bf16 nn.Linear.

    python -m scripts.benchmarks.mor --tokens 8192 --sizes 2048 4096 8192 --json mor_linear.json

Times are medians over steps of (forward, backward to input and weight), CUDA events around each
step, the step's host waits inside. The recipes take turns within one process, so clocks and heat
hit them alike. torchao's tensorwise float8 training stands beside them where it is installed.
All backward passes run in the calling thread, as `mor.training` does it: with autograd's own thread
(--engine-thread) a backward pass with Python in it waits for a hand-over, 0.4 ms a step on a slow
host.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import mor
from mor import MorConfig

RECIPES: dict[str, MorConfig | None] = {
    "bf16": None,
    "mor, decides each step": MorConfig(products="real"),
    "mor, refresh_every=16": MorConfig(products="real", refresh_every=16),
}
TARGETS = {
    4096: {"mor, decides each step": 1.05, "mor, refresh_every=16": 1.2},
    8192: {"mor, decides each step": 1.3, "mor, refresh_every=16": 1.4},
}
"""Least speed-up over bf16 that a size is meant to reach."""


def step_of(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        model(x).backward(grad)

    return step


def models_of(size: int, *, compiled: bool) -> tuple[dict[str, nn.Module], list[str]]:
    """One layer in every recipe, and what could not be made, with the reason."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16))
    models: dict[str, nn.Module] = {}
    for name, config in RECIPES.items():
        model = copy.deepcopy(plain)
        models[name] = model if config is None else mor.swap_linears(model, config)
    missing = []
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        ao = convert_to_float8_training(copy.deepcopy(plain), config=config)
        models["torchao tensorwise"] = ao
        models["torchao tensorwise, compiled"] = torch.compile(copy.deepcopy(ao))
    except Exception as error:  # any failure of a peer belongs into the table, not in the way
        missing.append(f"torchao: {type(error).__name__}: {error}")
    if compiled:
        models["bf16, compiled"] = torch.compile(copy.deepcopy(plain))
    return models, missing


def time_steps(
    steps: dict[str, Callable[[], None]], rounds: int, per_round: int
) -> dict[str, list[float]]:
    """Milliseconds of each step, recipes taking turns of `per_round` steps."""
    for step in steps.values():
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(per_round + 1)]
            marks[0].record()
            for mark in marks[1:]:
                step()
                mark.record()
            torch.cuda.synchronize()
            # The whole turn over its steps: with refresh_every=16 one step in 16 decides.
            times[name].append(marks[0].elapsed_time(marks[-1]) / per_round)
    return times


def bench(size: int, tokens: int, rounds: int, compiled: bool) -> list[dict[str, object]]:
    models, missing = models_of(size, compiled=compiled)
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    steps, failed = {}, list(missing)
    for name, model in models.items():
        try:
            step_of(model, x, grad)()
            steps[name] = step_of(model, x, grad)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    times = time_steps(steps, rounds, per_round=32)
    base = statistics.median(times["bf16"])
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        median = statistics.median(values)
        target = TARGETS.get(size, {}).get(name)
        row: dict[str, object] = {
            "size": size,
            "tokens": tokens,
            "recipe": name,
            "ms": median,
            "ms_low": min(values),
            "ms_high": max(values),
            "speedup": base / median,
            "target": target,
            "reached": None if target is None else base / median >= target,
        }
        if name.startswith("mor"):
            row["products"] = mor.stats(models[name])["products"]
        rows.append(row)
    rows.extend({"size": size, "recipe": text, "failed": True} for text in failed)
    return rows


def breakdown(size: int, tokens: int) -> dict[str, float]:
    """Microseconds of MoR's parts on input and weight and of the products, each alone."""
    from mor import fp8

    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    largest, largest_grad = fp8.amax(x, w), fp8.amax(grad)
    (a, b), _ = fp8.cast([x, w], largest, "e4m3")
    assert a.plain is not None and b.plain is not None
    left, right = a.plain, b.plain
    parts: dict[str, Callable[[], object]] = {
        "amax of both": lambda: fp8.amax(x, w),
        "cast both": lambda: fp8.cast([x, w], largest, "e4m3"),
        "cast and measure both": lambda: fp8.cast([x, w], largest, "e4m3", measured=True),
        "cast both transposed": lambda: fp8.cast(
            [x, w], largest, "e4m3", plain=False, transposed=True
        ),
        "cast the gradient, both ways": lambda: fp8.cast(
            [grad], largest_grad, "e4m3", transposed=True
        ),
        "bf16 product": lambda: x @ w.t(),
        "fp8 product, fast": lambda: fp8.real_product(
            left, right, torch.bfloat16, fast_accumulation=True
        ),
        "fp8 product": lambda: fp8.real_product(
            left, right, torch.bfloat16, fast_accumulation=False
        ),
    }
    times = time_steps({n: lambda f=f: f() for n, f in parts.items()}, rounds=5, per_round=20)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def agreement(size: int, tokens: int) -> dict[str, object]:
    """Real against emulated: relative distance of the results, and whether decisions are equal."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(size, size, bias=False, device="cuda", dtype=torch.bfloat16))
    results, decisions = [], []
    for products in ("real", "emulated"):
        config = MorConfig(formats=("e4m3", "e5m2", "bf16"), products=products)  # type: ignore[arg-type]
        model = mor.swap_linears(copy.deepcopy(plain), config)
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, generator=generator)
        x.requires_grad_()
        out = model(x)
        out.backward(torch.randn(out.shape, device="cuda", dtype=out.dtype, generator=generator))
        results.append((out.detach(), x.grad, model[0].weight.grad))
        decisions.append(mor.stats(model)["operands"])
    names = ("out", "grad_input", "grad_weight")
    distances = {
        name: float((a.float() - b.float()).norm() / b.float().norm())
        for name, a, b in zip(names, *results, strict=True)
    }
    return {"size": size, "distances": distances, "decisions_equal": decisions[0] == decisions[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="bf16 under torch.compile, too")
    parser.add_argument(
        "--engine-thread", action="store_true", help="backward in autograd's thread"
    )
    parser.add_argument("--json", help="write all numbers there")
    arguments = parser.parse_args()
    torch.autograd.set_multithreading_enabled(arguments.engine_thread)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {arguments.tokens} tokens, bf16")
    everything: dict[str, object] = {
        "schema": "mor.linear_bench/1",
        "device": name,
        "torch": torch.__version__,
        "engine_thread": arguments.engine_thread,
    }
    rows = []
    for size in arguments.sizes:
        for row in bench(size, arguments.tokens, arguments.rounds, arguments.compiled):
            rows.append(row)
            if row.get("failed"):
                print(f"{size:6}  not run: {row['recipe']}")
                continue
            verdict = {None: "", True: "met", False: "missed"}[row["reached"]]  # type: ignore[index]
            target = f"target {row['target']}" if row["target"] else ""
            print(
                f"{size:6}  {row['recipe']:32} {row['ms']:8.3f} ms "
                f"[{row['ms_low']:.3f}, {row['ms_high']:.3f}]  x{row['speedup']:.3f}  "
                f"{target} {verdict}"
            )
    everything["rows"] = rows
    everything["parts_us"] = {size: breakdown(size, arguments.tokens) for size in arguments.sizes}
    for size, parts in everything["parts_us"].items():  # type: ignore[attr-defined]
        print(f"{size:6}  " + ", ".join(f"{n} {t:.0f} us" for n, t in parts.items()))
    everything["agreement"] = agreement(arguments.sizes[0], arguments.tokens)
    print("real against emulated:", everything["agreement"])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
