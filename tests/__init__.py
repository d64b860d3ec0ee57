"""Imports make a million objects that stay: Python would go through all of them again and again, a twentieth of the time of
the tests."""

import gc

gc.set_threshold(50_000, 20, 20)
