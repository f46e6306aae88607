"""One file for each family of models, with its `Architecture` entry. Import-light."""

from proposers.models import mimo, mimo_v2, step3p5

ALL = (step3p5.ARCHITECTURE, mimo.ARCHITECTURE, *mimo_v2.ARCHITECTURES)
