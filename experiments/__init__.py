"""Hydra entry points: compose, validate, call the library, write the record."""

import os

# Read once, when torch loads GNU OpenMP: how long a thread spins for its next work before it sleeps.
# A search step on two idle cores takes 0.56 s with this value or any larger one, 0.79 s with none.
# With a third busy thread beside it: 1.0 s with none, 1.6 s with this one, 2.7 s and more beyond.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "3000"
