"""One file for each family of models, with its `Architecture` entry. Import-light."""

from proposers.models import deepseek_v3, ernie4_5_moe, exaone_moe, glm4_moe, mimo, mimo_v2, qwen3_5, step3p5

ALL = (
    *(module.ARCHITECTURE for module in (step3p5, mimo, glm4_moe, exaone_moe, ernie4_5_moe, qwen3_5, deepseek_v3)),
    *mimo_v2.ARCHITECTURES,
)
