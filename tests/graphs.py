"""CUDA graphs without a GPU."""


class Imitation:
    """What `GraphedStep` does with memory, on a CPU: inputs and results have one place each, written over by
    every call."""

    made = 0

    def __init__(self, step, *inputs):
        self.step, self.inputs = step, [value.clone() for value in inputs]
        self.results = tuple(result.clone() for result in step(*self.inputs))
        Imitation.made += 1

    def __call__(self, *inputs):
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        for kept, result in zip(self.results, self.step(*self.inputs), strict=True):
            kept.copy_(result)
        return self.results
