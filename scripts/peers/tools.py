"""Which peers there are, what each can be asked for, and where its environment is."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dmx.errors import RunError

from .protocol import COMPILE, INPUTS, PUBLISHED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MXFP = ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3")
RULE = "rule"
"""The option of what is ours: the scale rule of weights and inputs that it is told; floor where it is not given."""
LEARN_INPUTS = "learn_inputs"
"""The option of what learns: inputs are left alone (bf16) meanwhile, whatever the formats were chosen for."""
LEARNS = ("learn_steps", LEARN_INPUTS, RULE, INPUTS)
"""Options of what learns."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One thing that a peer can be asked for."""

    label: str
    """What tables call it."""
    formats: tuple[str, ...] = MXFP
    """That it can be given."""
    gives: str = "formats"
    """formats | weights: weights, too; their formats were chosen by another method (`after`) or by this one."""
    after: str | None = None
    """PEER:METHOD whose formats it is given."""
    rotates: bool = False
    """Whether its weights are of a rotated model, whose other parameters it leaves beside them."""
    holds_biases: bool = True
    """Whether biases stay as they are, or its file has those that a rotation changed."""
    units: tuple[str, ...] = ("fused", "layer")
    families: tuple[tuple[str, ...], ...] | None = None
    """Lists of candidates that it can be given; None: any of its formats."""
    needs: tuple[str, ...] = ()
    """Options without which it cannot run."""
    takes: tuple[str, ...] = ()
    """Options that it may be given."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One tool."""

    worker: str
    """Of scripts.peers.workers."""
    methods: dict[str, Method]
    own_rule: str | None = None
    """The scale rule of its MX weights and inputs, under which our measurement must give its own."""
    environment: str | None = None
    """Of .venv-peers; None: ours."""
    packages: tuple[str, ...] = ()
    """Whose versions a given environment (--python) must have as `environments/NAME.txt` says them."""
    cannot: tuple[str, ...] = field(default=())
    """What it was asked for in vain, as its version is; goes to the records."""


PEERS = {
    "ours": Peer(
        worker="ours",
        methods={
            name: Method(label=f"dmx {label}", takes=(RULE, INPUTS))
            for name, label in {
                "kl_per_bit": "kl_per_bit",
                "fisher": "fisher",
                "dmx_40": "exact, 40 steps",
                "dmx_80": "exact, 80 steps",
                "exact": "exact, 400 steps",
                "differentiable": "differentiable, 400 steps",
                "adaptive": "adaptive",
                "kl_per_bit_polish": "kl_per_bit, polished",
                "adaptive_polish": "adaptive, polished",
            }.items()
        },
    ),
    "ours_weights": Peer(
        worker="ours",
        methods={
            "learned": Method(
                label="dmx learned",
                gives="weights",
                after="auto_round:auto_scheme",
                takes=LEARNS,
            ),
            "gptq": Method(
                label="dmx GPTQ, blocks by activity",
                gives="weights",
                after="auto_round:auto_scheme",
                takes=(RULE, INPUTS),
            ),
            "adaptive_learned": Method(
                label="dmx adaptive, then learned",
                gives="weights",
                after="ours:adaptive",
                takes=LEARNS,
            ),
            "adaptive_polish_learned": Method(
                label="dmx adaptive, polished, then learned",
                gives="weights",
                after="ours:adaptive_polish",
                takes=LEARNS,
            ),
            "adaptive_rotated_learned": Method(
                label="dmx adaptive, hadamard block, then learned",
                gives="weights",
                rotates=True,
                takes=LEARNS,
            ),
            "kl_per_bit_learned": Method(
                label="dmx kl_per_bit, then learned",
                gives="weights",
                after="ours:kl_per_bit",
                takes=LEARNS,
            ),
        },
    ),
    "modelopt": Peer(
        worker="modelopt_worker",
        environment="modelopt",
        packages=("nvidia-modelopt",),
        own_rule="rceil",
        methods={
            "gradient": Method(label="ModelOpt AutoQuantize, gradient", takes=(INPUTS,)),
            "kl_div": Method(label="ModelOpt AutoQuantize, kl_div", takes=(INPUTS,)),
        },
        cannot=(
            "Aumann-Shapley scores (arXiv 2607.12266) are not in 0.47.0",
            "its MXFP6 preset is E3M2; E2M3 is given as a format of its own",
        ),
    ),
    "auto_round": Peer(
        worker="auto_round_worker",
        environment="auto_round",
        packages=("auto-round",),
        own_rule="floor",
        methods={
            "auto_scheme": Method(label="auto-round AutoScheme", takes=(INPUTS,)),
            "sign_round": Method(
                label="auto-round SignRound",
                gives="weights",
                after="auto_round:auto_scheme",
                takes=("iters", INPUTS),
            ),
        },
    ),
    "brevitas": Peer(
        worker="brevitas_worker",
        environment="brevitas",
        packages=("brevitas",),
        own_rule="floor",
        methods={
            "dmx": Method(
                label="dMX as published, rotations off",
                families=(("mxfp4", "mxfp8_e4m3"), ("mxfp4", "mxfp6_e2m3")),
                units=("layer",),
                needs=(PUBLISHED,),
                takes=("steps", COMPILE),
            ),
            "dmx_rotated": Method(
                label="dMX as published, rotations learned",
                gives="weights",
                rotates=True,
                holds_biases=False,
                families=(("mxfp4", "mxfp8_e4m3"), ("mxfp4", "mxfp6_e2m3")),
                units=("layer",),
                needs=(PUBLISHED,),
                takes=("steps", COMPILE),
            ),
        },
        cannot=("it chooses for every layer alone; a penalty stands in place of a budget",),
    ),
    "quark": Peer(
        worker="quark_worker",
        environment="quark",
        packages=("amd-quark",),
        own_rule="even",
        methods={
            name: Method(
                label=f"Quark {label}",
                gives="weights",
                after="auto_round:auto_scheme",
                takes=(INPUTS,),
            )
            for name, label in {"gptq": "GPTQ", "gptaq": "GPTAQ", "qronos": "Qronos"}.items()
        },
        cannot=(
            "0.13's planner has no MX format among its candidates",
            "0.13's GPTQ, GPTAQ and Qronos give MXFP6 and MXFP8 scales that are no powers of two: MXFP4 alone is theirs",
        ),
    ),
    "llmcompressor": Peer(
        worker="llmcompressor_worker",
        environment="llmcompressor",
        packages=("llmcompressor", "compressed-tensors"),
        methods={
            "gptq": Method(
                label="llm-compressor GPTQ",
                formats=("mxfp4", "mxfp8_e4m3"),
                gives="weights",
                after="auto_round:auto_scheme",
                takes=(INPUTS,),
            ),
        },
        cannot=(
            "0.14.0.1 has no automatic choice of formats: a recipe names every layer's",
            "its MXFP presets are MXFP4 and MXFP8 alone",
        ),
    ),
}


def asked(name: str) -> list[tuple[str, str]]:
    """(peer, method) of `PEER` or `PEER:METHOD`; of a peer alone all that need no option.

    Raises:
        RunError: there is no such peer or method; says which there are.
    """
    peer, is_pair, method = name.partition(":")
    if peer not in PEERS:
        raise RunError(f"--peers {name}: no such peer. There are {', '.join(PEERS)}.")
    methods = PEERS[peer].methods
    if is_pair and method not in methods:
        raise RunError(f"--peers {name}: {peer} has {', '.join(methods)}.")
    return [(peer, m) for m in ([method] if is_pair else methods)]


def check_can(name: str, formats: Sequence[str], units: str, options: Sequence[str]) -> str | None:
    """Why `PEER:METHOD` cannot be given these candidates and units; None: it can."""
    peer, _, method = name.partition(":")
    can = PEERS[peer].methods[method]
    if missing := [f for f in formats if f not in can.formats]:
        return f"has no {', '.join(missing)}"
    if can.families is not None and tuple(formats) not in can.families:
        return f"takes {' or '.join('/'.join(f) for f in can.families)} alone"
    if units not in can.units:
        return f"chooses for {can.units[0]} units alone"
    if lacking := [n for n in can.needs if n not in options]:
        return f"needs --option {' '.join(f'{n}=...' for n in lacking)}"
    return None


def pins_of(peer: str) -> dict[str, str]:
    """package -> version that the peer's environment has, of the packages that are the tool itself."""
    lines = (HERE / "environments" / f"{PEERS[peer].environment}.txt").read_text().split()
    pinned = dict(line.split("==", 1) for line in lines)
    return {package: pinned[package] for package in PEERS[peer].packages}


def given_pythons(texts: Sequence[str]) -> dict[str, Path]:
    """peer -> interpreter, of `PEER=PATH`.

    Raises:
        RunError: no such peer, no interpreter, or it lacks the tool in the version that is asked for.
    """
    given = {}
    for text in texts:
        peer, _, path = text.partition("=")
        known = [name for name, p in PEERS.items() if p.environment]
        if peer not in known or not path:
            raise RunError(f"--python {text}: give PEER=PATH, a peer of {', '.join(known)}.")
        _check_packages(text, Path(path), peer)
        given[peer] = Path(path)
    return given


def _check_packages(text: str, python: Path, peer: str) -> None:
    """Raise RunError where an interpreter has not the peer's packages in their versions."""
    pins = pins_of(peer)
    asked_for = ", ".join(f"{k}=={v}" for k, v in pins.items())
    other = (
        f"Give an interpreter that has {asked_for}, or leave it out: `make peers PEERS="
        f"{PEERS[peer].environment}` makes one."
    )
    script = "import sys; from importlib.metadata import version; [print(version(n)) for n in sys.argv[1:]]"
    try:
        done = subprocess.run(
            [str(python), "-c", script, *pins],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise RunError(f"--python {text}: it does not run ({error}). {other}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(f"--python {text}: {asked_for} is not there ({why}). {other}")
    found = dict(zip(pins, done.stdout.split()[-len(pins) :], strict=False))  # it may greet first
    if found != pins:
        there = ", ".join(f"{k}=={v}" for k, v in found.items()) or "nothing to say of them"
        raise RunError(f"--python {text}: it has {there}. {other}")


def python_of(peer: str, given: Mapping[str, Path]) -> Path:
    """The interpreter that runs a peer: given, or of `.venv-peers`, or of the folder that DMX_PEERS names.

    Raises:
        RunError: its environment is not there.
    """
    name = PEERS[peer].environment
    if name is None:
        return Path(sys.executable)
    if peer in given:
        return given[peer]
    folder = Path(os.environ.get("DMX_PEERS", ROOT / ".venv-peers"))
    python = folder / name / "bin" / "python"
    if not python.is_file():
        raise RunError(
            f"{peer} is not installed: {python} does not exist. `make peers` makes it, `make peers PEERS={name}` it "
            f"alone; DMX_PEERS names another folder of environments, --python {peer}=PATH an interpreter that has it."
        )
    return python
