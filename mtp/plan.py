"""Which module, and whose head, makes which draft: an architecture's descriptor and the plan made from it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DraftDescriptor:
    """What the framework has to know of a draft architecture.

    Attributes:
        architecture: the draft's, as in its Hugging Face config after vLLM's override (`Step3p5MTP`).
        modules_key: the config attribute that counts the modules; None for a model of one module.
        own_heads: every module has a head of its own, which must not be replaced by the target's.
        hidden_states_flow: module i takes the hidden states of module i - 1, as DeepSeek-V3's and Step-3.5's do; else
            every module takes the target's, as MiMo-V2's.
    """

    architecture: str
    modules_key: str | None = None
    own_heads: bool = False
    hidden_states_flow: bool = True

    def count_modules(self, hf_config: Any) -> int:
        """Number of modules of this checkpoint.

        Raises:
            ValueError: the config names none.
        """
        if self.modules_key is None:
            return 1
        count = getattr(hf_config, self.modules_key, None)
        if not count:
            raise ValueError(
                f"The config of this {self.architecture} checkpoint has {self.modules_key}={count!r}: there is no "
                "module to draft with. Use a checkpoint with its MTP layers, or serve without a speculative config."
            )
        return int(count)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The steps of one drafting pass: step i makes draft i + 1 with module `module_of_step(i)` and that module's head.

    The first `chain_length` steps are the chain over the window, module i making draft i + 1. Once the modules are used
    up the chain slides on over rows that the target has not run, and the last module makes every further draft. (On
    the tiny model, draft 4 after three right ones: 0.89 accepted so, 0.56 by going round to module 0, 0.63 by the last
    module alone.)
    """

    num_modules: int
    num_speculative_tokens: int

    @classmethod
    def of(cls, descriptor: DraftDescriptor, vllm_config: Any) -> "DraftPlan":
        """The plan of an engine's configuration.

        Raises:
            ValueError: the model can't make the number of drafts asked for.
        """
        config = vllm_config.speculative_config
        hf_config, max_model_len = config.draft_model_config.hf_config, vllm_config.model_config.max_model_len
        return cls.make(descriptor, hf_config, config.num_speculative_tokens, max_model_len)

    @classmethod
    def make(
        cls, descriptor: DraftDescriptor, hf_config: Any, num_speculative_tokens: int, max_model_len: int
    ) -> "DraftPlan":
        """Checks that the model can make that many drafts.

        Raises:
            ValueError: it can't.
        """
        if num_speculative_tokens >= max_model_len:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens} leaves no room for a prompt in "
                f"max_model_len={max_model_len}: no step could ever draft. Use fewer drafts or a longer max_model_len."
            )
        return cls(descriptor.count_modules(hf_config), num_speculative_tokens)

    @property
    def chain_length(self) -> int:
        """Modules that ever run: those past the number of drafts have nothing to do."""
        return min(self.num_modules, self.num_speculative_tokens)

    def module_of_step(self, step: int) -> int:
        return min(step, self.num_modules - 1)
