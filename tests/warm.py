"""Imported by the server of `forked`: what every process that it forks would do again."""

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401

from dmx.state import code_version

for module in ("dmx.searching.scan", "dmx.searching.polish", "dmx.weights.learned_blocks"):
    code_version(module)

gc.collect()
gc.freeze()  # what all of them have, none goes through again
