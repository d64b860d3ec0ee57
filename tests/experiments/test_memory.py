"""Freed memory is used again."""

import platform

import pytest

from tests.forked import Forked

CHILD = """
import resource, torch
from experiments.running.memory import keep_freed_memory
def faults_of_a_tensor():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults_of_a_tensor()
before = faults_of_a_tensor()
assert keep_freed_memory()
after = [faults_of_a_tensor() for _ in range(40)]  # the heap needs a few to settle
print(before, max(after[-10:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is set")
def test_the_next_tensor_takes_the_memory_that_the_last_one_freed():
    out, err = Forked("-c", CHILD).communicate()
    assert out, err
    before, after = map(int, out.split())
    assert after < before / 10
