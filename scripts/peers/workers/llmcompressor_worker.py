"""llm-compressor: GPTQ's weights of formats that another method chose; it has no search of its own."""

from typing import Any

from .common import Cell, main

PRESETS = {"mxfp4": "MXFP4", "mxfp8_e4m3": "MXFP8"}


def groups_of(given: dict[str, str], has_inputs: bool) -> dict[str, list[str]]:
    """llm-compressor's preset of a format, with inputs or without -> layers, each named in full."""
    groups: dict[str, list[str]] = {}
    for layer, block_format in given.items():
        groups.setdefault(PRESETS[block_format] + ("" if has_inputs else "A16"), []).append(layer)
    return groups


def gptq(cell: Cell) -> None:
    """Answers with GPTQ's weights."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader

    asked = cell.request
    assert asked.given is not None
    model: Any = cell.model()
    groups = {
        f"group_{i}": preset_name_to_scheme(preset, layers)
        for i, (preset, layers) in enumerate(groups_of(asked.given, asked.has_inputs).items())
    }
    loader = DataLoader(cell.batches(), batch_size=None)
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
    cell.timed(
        lambda: oneshot(
            model=model, recipe=recipe, dataset=loader, num_calibration_samples=len(cell.tokens)
        )
    )
    peak = cell.peak()
    cell.save_weights({name: model.get_submodule(name).weight for name in cell.layers})
    cell.answer(
        asked.given, ("llmcompressor", "compressed-tensors"), peak=peak, own_nll=cell.own_nll(model)
    )


METHODS = {"gptq": gptq}

if __name__ == "__main__":
    main(lambda cell: METHODS[cell.request.method](cell))
