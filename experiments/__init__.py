"""Hydra entry points: compose, validate, call the library, write the record."""

import os

# Read once, when torch loads OpenMP. Threads that spin while they wait for each other are six times
# slower than one thread as soon as anything else runs on the machine (bf16 products on two cores:
# 4.5 s against 0.78 s), and no faster to speak of when nothing does (0.67 s against 0.76 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
