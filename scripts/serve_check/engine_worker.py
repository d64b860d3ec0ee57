"""Run as a script in the engine's own environment: what vLLM makes of folders.

Knows vLLM and nothing of dmx. Takes JSON jobs, one a folder (`worker`): vLLM leaves things behind, after a failed load most of
all. Writes `out` (safetensors: log-probabilities of the prompts, inputs and outputs of every linear layer) and `out`.json
(versions, scheme and kernel of each layer, bytes, speed).

    folder, dtype      what is loaded
    tokens             safetensors with `tokens`, (rows, window) int64
    hooks              keep the operands of every linear layer in the first row
    speed              null, or prompt, prompts, new: tokens a prompt, prompts at once, tokens made after each
    eager              no compilation and no graphs; hooks need it
    rounds_inputs      of the kernels that stand in on a CPU; see cpu_kernels
    options            more arguments of vllm.LLM
"""

import json
import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the model lives in this process
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # LLM.apply_model takes functions
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Prompts are scored and decoding is greedy: nothing is sampled.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import worker
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

KERNELS = ("kernel", "ocp_mx_linear", "fp8_linear", "linear_kernel")
"""Where schemes keep what multiplies."""


def part_names(layer: Any) -> dict[str, str]:
    """scheme and kernel of a linear layer, by class name."""
    method = layer.quant_method
    scheme = getattr(layer, "scheme", None) or method
    kernel = next((k for name in KERNELS if (k := getattr(scheme, name, None)) is not None), None)
    kind = type(kernel) if kernel is not None else type(method)
    ours = kind.__module__.endswith("cpu_kernels")
    return {
        "method": type(method).__name__,
        "scheme": type(scheme).__name__,
        "kernel": f"scripts.serve_check.{kind.__name__}" if ours else kind.__name__,
    }


def linear_layers(model: Any) -> dict[str, Any]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LinearBase)
    }


def facts_of(model: Any) -> dict[str, Any]:
    """Layers with their schemes and kernels, the names that were fused, and bytes of all parameters on a card: on the
    CPU vLLM hides packed ones."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return {
        "architecture": type(model).__name__,
        "layers": {name: part_names(layer) for name, layer in linear_layers(model).items()},
        "fused": {k: list(v) for k, v in getattr(model, "packed_modules_mapping", {}).items()},
        "weight_bytes": None if current_platform.is_cpu() else size,
    }


def prompts_of(tokens: Tensor) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": row} for row in tokens.tolist()]


def log_probabilities(llm: LLM, tokens: Tensor) -> Tensor:
    """(rows, window - 1) float64: of each token after the first, given those before it."""
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    done = llm.generate(prompts_of(tokens), asked, use_tqdm=False)
    rows = [
        [
            given[token].logprob
            for given, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)
        ]
        for out, row in zip(done, tokens.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def seconds_of(llm: LLM, prompts: list[dict[str, Any]], new: int) -> float:
    asked = SamplingParams(max_tokens=new, min_tokens=new, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, asked, use_tqdm=False)
    return time.perf_counter() - started


def speed_of(llm: LLM, prompt: int, prompts: int, new: int, vocabulary: int) -> dict[str, Any]:
    """Tokens per second: all prompts up to the first new token, and the others after it."""
    generator = torch.Generator().manual_seed(0)
    rounds = []
    for _ in range(4):  # the first warms up
        given = prompts_of(torch.randint(vocabulary, (prompts, prompt), generator=generator))
        first = seconds_of(llm, given, 1)
        rounds.append((first, seconds_of(llm, given, new) - first))
    first, rest = (sorted(times)[1] for times in zip(*rounds[1:], strict=True))
    return {
        "prompt": prompt,
        "prompts": prompts,
        "new": new,
        "prefill_tokens_per_second": prompt * prompts / first,
        "decode_tokens_per_second": (new - 1) * prompts / rest,
        "prefill_seconds": [a for a, _ in rounds[1:]],
        "decode_seconds": [b for _, b in rounds[1:]],
    }


def peak_bytes() -> dict[str, int]:
    """Of this process; on a card also of its memory, the cache of keys and values included."""
    found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        found["card"] = torch.cuda.max_memory_allocated()
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if current_platform.is_cuda() else "cpu"


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    tokens = load_file(job["tokens"])["tokens"]
    if current_platform.is_cpu():
        import cpu_kernels

        cpu_kernels.register(rounds_inputs=job["rounds_inputs"])
    started = time.perf_counter()
    longest = (
        max(tokens.shape[1], *((s["prompt"] + s["new"],) if (s := job["speed"]) else (0,))) + 1
    )
    llm = LLM(
        model=job["folder"],
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        max_model_len=longest,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
        **job["options"],
    )
    loaded = time.perf_counter() - started
    (facts,) = llm.apply_model(facts_of)
    tensors, operands = {}, worker.Operands(linear_layers)
    if job["hooks"]:
        llm.apply_model(operands.watch)
        log_probabilities(llm, tokens[:1])
        llm.apply_model(operands.release)
        tensors = operands.kept
    tensors["log_probabilities"] = log_probabilities(llm, tokens)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    speed = speed_of(llm, **job["speed"], vocabulary=vocabulary) if job["speed"] else None
    save_file({name: t.contiguous() for name, t in tensors.items()}, job["out"])
    import vllm

    report = {
        **facts,
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
        "kernels": dict(Counter(layer["kernel"] for layer in facts["layers"].values())),
        "load_seconds": loaded,
        "speed": speed,
        "peak_bytes": peak_bytes(),
    }
    Path(job["out"] + ".json").write_text(json.dumps(report))


if __name__ == "__main__":
    worker.start(main)
