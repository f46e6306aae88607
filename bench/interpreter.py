"""vLLM's V2 model runner on the CPU: its Triton kernels, run by Triton's interpreter.

The runner is Python around some dozens of small Triton kernels, and vLLM's CPU build has them only with a Triton that
compiles for the CPU, which is not published. The interpreter runs the same kernels line by line on the same tensors:
too slow to measure anything, and otherwise the runner itself.
"""

import os
from typing import Any


def interpret_triton() -> None:
    """Has Triton's interpreter run the kernels of this process; to be called before vLLM is first imported.

    Raises:
        ImportError: Triton is not installed.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.backends import backends
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    class Driver:
        """vLLM asks for a backend called `cpu`, and whether it is there, when it is imported."""

        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        compiler = None
        driver = Driver

    others = dict(backends)
    backends.clear()
    backends["cpu"] = Backend
    import vllm.triton_utils

    assert vllm.triton_utils.HAS_TRITON
    # PyTorch's compiler must not find it.
    backends.clear()
    backends.update(others)
    builder = interpreter.InterpreterBuilder
    for name, where in {"create_masked_load": 0, "create_masked_store": 1}.items():
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), where))
    interpreter._patch_lang = _unless_patched(interpreter._patch_lang, interpreter._LangPatchScope)
    libdevice.log1p = lambda x: tl.log(1.0 + x)  # a function of CUDA's own library, and here of none


def _with_boolean_mask(access: Any, where: int) -> Any:
    """Makes the mask of a load or store boolean: a block's and a scalar's combined are bytes, which are refused."""

    def access_with_boolean_mask(self: Any, ptrs: Any, *args: Any) -> Any:
        mask = args[where]
        mask.data = mask.data.astype(bool)
        return access(self, ptrs, *args)

    return access_with_boolean_mask


def _unless_patched(patch_lang: Any, make_scope: Any) -> Any:
    """Leaves the language alone where it is the interpreter's already.

    A kernel's start makes it that, and its end restores it. Every function that the kernel calls has it made again,
    member by member, which takes a quarter of the time that the interpreter needs.
    """
    import triton.language as tl

    def is_patched(language: Any) -> bool:
        return not any(map(tl.core.is_builtin, (language.load, language.tensor.__add__)))

    def patch_unless_patched(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return make_scope() if languages and all(map(is_patched, languages)) else patch_lang(fn)

    return patch_unless_patched


def choose_runner(name: str) -> None:
    """Engines of this process run on vLLM's model runner `v1` or `v2`; to be called before vLLM is first imported."""
    import torch

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(name == "v2"))
    if name == "v2" and not torch.cuda.is_available():
        interpret_triton()


def choose_runner_from_environment() -> None:
    """Chooses, in a child process, the runner that its parent has put into the environment (`choose_runner`)."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        choose_runner("v2")


def run_recurrent_states() -> None:
    """Engines of this process on a CPU can keep recurrent states in the prefix cache, and draft beside them.

    To be called before vLLM is first imported; nothing is done where there is a GPU. The states are copied between
    blocks by Triton kernels. What updates one request's state alone refuses the stride of its single index.
    """
    import torch

    if torch.cuda.is_available():
        return
    interpret_triton()
    from vllm import _custom_ops

    update = _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu

    def update_with_plain_indices(*, initial_state_indices: Any, **kwargs: Any) -> Any:
        plain = initial_state_indices.clone(memory_format=torch.contiguous_format)
        return update(initial_state_indices=plain, **kwargs)

    _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = update_with_plain_indices
