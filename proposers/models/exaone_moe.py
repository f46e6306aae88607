"""EXAONE-MoE: chained modules, each one full or sliding decoder layer; all else is shared by them."""

from mtp.plan import DraftDescriptor
from proposers.architecture import Architecture

ARCHITECTURE = Architecture(
    DraftDescriptor("ExaoneMoeMTP", modules_key="num_nextn_predict_layers"), module_weights="mtp.layers.{module}."
)
